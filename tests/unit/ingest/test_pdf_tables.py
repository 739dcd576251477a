"""Tables of PDFs as tables: ruled and without lines, over lines and pages; text in columns stays text."""

from __future__ import annotations

import re
from random import Random

import pytest
from bench import tables

from ml_rag.ingest.formats.pdf_grid import Ruling
from ml_rag.ingest.formats.pdf_tables import find_tables
from ml_rag.ingest.formats.pdf_words import Word
from ml_rag.ingest.parse import parse
from support.office import placed_pdf, right_to_left_pdf, text_pdf, turned_pdf
from support.shared_data import SHARED, shared

Text = tuple[float, float, str]


def grid(rows: list[list[str]], xs: list[float], top: float = 700, step: float = 15) -> list[Text]:
    """Texts of rows at these places; a cell's lines, apart by line ends, are 12 points apart."""
    texts = []
    for row in rows:
        height = max(cell.count("\n") for cell in row)
        for x, cell in zip(xs, row, strict=True):
            texts += [(x, top - 12 * i, line) for i, line in enumerate(cell.split("\n")) if line]
        top -= step + 12 * height
    return texts


def boxes(xs: list[float], ys: list[float]) -> list[tuple[float, float, float, float]]:
    return [*((xs[0], y, xs[-1], y) for y in ys), *((x, ys[0], x, ys[-1]) for x in xs)]


def blocks(content: bytes) -> list[str]:
    return [block.text for block in parse("a.pdf", content).blocks]


def test_a_table_without_lines_is_one_with_empty_cells_where_there_are_none() -> None:
    rows = [["Plan", "Copay", "Deductible"], ["Basic", "$20", "$1,500"], ["Plus", "", "$900"], ["Gold", "$5", "$0"]]
    (text,) = blocks(placed_pdf(grid(rows, [72, 200, 300])))
    assert text == (
        "| Plan | Copay | Deductible |\n| --- | --- | --- |\n"
        "| Basic | $20 | $1,500 |\n| Plus |  | $900 |\n| Gold | $5 | $0 |"
    )


@pytest.mark.parametrize(
    ("degrees", "is_turned_back"), [(0, True), (90, True), (180, True), (270, True), (90, False), (270, False)]
)
def test_a_page_that_is_turned_is_read_as_readers_turn_it(degrees: int, *, is_turned_back: bool) -> None:
    rows = [["Plan", "Copay", "Deductible"], ["Basic", "$20", "$1,500"], ["Plus", "$9", "$900"]]
    above = [(72, 560, "What the plans of this year cost, in a text of several"), (72, 548, "lines, which ends here.")]
    texts = [*above, *grid(rows, [72, 200, 300], top=500), (72, 400, "Ask your manager.")]
    assert blocks(turned_pdf(degrees, texts, is_turned_back=is_turned_back)) == [
        "What the plans of this year cost, in a text of several lines, which ends here.\n\n"
        "| Plan | Copay | Deductible |\n| --- | --- | --- |\n| Basic | $20 | $1,500 |\n| Plus | $9 | $900 |\n\n"
        "Ask your manager."
    ]


def test_text_around_a_table_stays_where_it_is() -> None:
    rows = [["Plan", "Copay", "Deductible"], ["Basic", "$20", "$1,500"]]
    texts = [
        (72, 740, "What the plans of this year cost."),
        *grid(rows, [72, 200, 300]),
        (72, 640, "Ask your manager."),
    ]
    assert blocks(placed_pdf(texts)) == [
        "What the plans of this year cost.\n\n"
        "| Plan | Copay | Deductible |\n| --- | --- | --- |\n| Basic | $20 | $1,500 |\n\nAsk your manager."
    ]


def test_a_ruled_table_has_cells_over_several_lines_and_its_columns_may_be_close() -> None:
    rows = [["Kind", "Before"], ["Basis", "food and\nwater"], ["Names", "first,\nsecond,\nthird"]]
    ys = [712.0, 694.0, 667.0, 628.0]
    texts = grid(rows, [74, 112])
    (text,) = blocks(placed_pdf(texts, lines=boxes([72.0, 110.0, 160.0], ys)))
    assert text == ("| Kind | Before |\n| --- | --- |\n| Basis | food and water |\n| Names | first, second, third |")


def test_a_header_over_two_lines_names_each_column() -> None:
    texts = [
        (170, 715, "In network"), (300, 715, "Elsewhere"),
        *grid([["Plan", "Copay", "Rate", "Copay", "Rate"], ["Basic", "$20", "10%", "$40", "30%"],
               ["Plus", "$10", "5%", "$30", "20%"]], [72, 150, 210, 280, 340]),
    ]  # fmt: skip
    (text,) = blocks(placed_pdf(texts))
    assert text.splitlines()[0] == ("| Plan | In network Copay | In network Rate | Elsewhere Copay | Elsewhere Rate |")
    assert text.splitlines()[2] == "| Basic | $20 | 10% | $40 | 30% |"


def test_a_header_cell_over_ruled_columns_names_each_of_them() -> None:
    texts = [(74, 700, "Plan"), (160, 700, "Copay"), (122, 680, "in"), (182, 680, "out"),
             *grid([["Basic", "$20", "$40"], ["Plus", "$10", "$30"]], [74, 122, 182], top=660, step=20)]  # fmt: skip
    lines = [*boxes([72, 120, 180, 240], [674, 654, 634]), (72, 714, 240, 714), (120, 694, 240, 694),
             (72, 714, 72, 674), (120, 714, 120, 674), (240, 714, 240, 674), (180, 694, 180, 674)]  # fmt: skip
    (text,) = blocks(placed_pdf(texts, lines=lines))
    assert text == "| Plan | Copay in | Copay out |\n| --- | --- | --- |\n| Basic | $20 | $40 |\n| Plus | $10 | $30 |"


def test_figures_below_one_another_in_a_cell_are_of_one_record() -> None:
    rows = [["Project", "Period", "Lead"]]
    rows += [["Alpha", "01.01.2024\n31.12.2024", "Ann"], ["Beta", "05.05.2022\n06.06.2022", "Bob"]]
    (text,) = blocks(placed_pdf(grid(rows, [72, 200, 330], step=22)))
    assert text.splitlines()[2:] == [
        "| Alpha | 01.01.2024 31.12.2024 | Ann |",
        "| Beta | 05.05.2022 06.06.2022 | Bob |",
    ]


def test_lines_of_a_cell_without_rules_are_told_from_rows_by_their_distance() -> None:
    rows = [["Item", "Notes", "Count"], ["Bolt", "kept in the\nupper drawer", "12"], ["Nut", "none", "7"]]
    (text,) = blocks(placed_pdf(grid(rows, [72, 150, 300], step=24)))
    assert text.splitlines()[2:] == ["| Bolt | kept in the upper drawer | 12 |", "| Nut | none | 7 |"]


def test_lines_of_a_cell_may_stand_above_the_others_of_their_row() -> None:
    """As cells at the bottom of their rows do."""
    rows = [
        ["A1", "Moving the archive\nTo a new server", "2"],
        ["A2", "Travel", "1"],
        ["A3", "Paper\n80 g\nWhite", "7"],
    ]
    texts = grid([["No", "Description", "Count"]], [72, 120, 300], top=722)
    top = 700.0
    for number, lines, count in rows:
        bottom = top - 12 * lines.count("\n")
        texts += [(72, bottom, number), *grid([[lines]], [120], top=top), (300, bottom, count)]
        top = bottom - 22
    (text,) = blocks(placed_pdf(texts))
    assert text.splitlines()[0] == "| No | Description | Count |"
    assert text.splitlines()[2:] == [f"| {' | '.join(row)} |".replace("\n", " ") for row in rows]


def test_records_of_a_group_that_is_named_once_are_rows() -> None:
    """Where the groups are further apart than their records."""
    texts = grid([["Region", "Goods", "Pieces"]], [72, 160, 260], top=722)
    groups = [[[name, "Lamps", "12"], ["", "Tents", "15"], ["", "Ropes", "170"]] for name in ("North", "South")]
    for i, group in enumerate(groups):
        texts += grid(group, [72, 160, 260], top=700 - 46 * i, step=12)
    (text,) = blocks(placed_pdf(texts))
    assert text.splitlines()[2:] == [f"| {' | '.join(row)} |" for group in groups for row in group]


def middle(rows: list[list[str]], xs: list[float], step: float) -> list[Text]:
    """As ``grid``, each cell in the middle of its row, as browsers print them."""
    texts: list[Text] = []
    top = 700.0
    for row in rows:
        height = max(cell.count("\n") for cell in row)
        for x, cell in zip(xs, row, strict=True):
            down = 6 * (height - cell.count("\n"))
            texts += [(x, top - down - 12 * i, line) for i, line in enumerate(cell.split("\n")) if line]
        top -= step + 12 * height
    return texts


@pytest.mark.parametrize("step", [15, 20, 40])
def test_cells_may_stand_in_the_middle_of_their_rows(step: float) -> None:
    rows = [
        ["Item", "Notes\nfor all", "Count", "Where"],
        ["Bolt", "kept in the\nupper drawer\nof the shelf", "12", "here\nor there"],
        ["Nut", "none", "", "hall"],
        ["Washer\nof steel", "a\nb\nc\nd", "7", "hall"],
    ]
    (text,) = blocks(placed_pdf([(72, 760, "Above"), *middle(rows, [72, 150, 300, 360], step), (72, 480, "Below")]))
    assert text == (
        "Above\n\n| Item | Notes for all | Count | Where |\n| --- | --- | --- | --- |\n"
        "| Bolt | kept in the upper drawer of the shelf | 12 | here or there |\n| Nut | none |  | hall |\n"
        "| Washer of steel | a b c d | 7 | hall |\n\nBelow"
    )


def test_paragraphs_of_a_list_and_of_columns_are_no_cells() -> None:
    listed = [
        (x, 700.0 - 60 * i - 12 * j, text)
        for i in range(5)
        for x, j, text in [(72.0, 0, "[Ab1]"), *((110.0, j, line) for j, line in enumerate(LEFT))]
    ]
    beside = [
        (x, 700.0 - y - 62 * i - 12 * j, line)
        for x, y, lines in ((72.0, 0, LEFT), (320.0, 5, RIGHT))
        for i in range(4)
        for j, line in enumerate(lines)
    ]
    for texts in (listed, beside):
        assert not any("|" in text for text in blocks(placed_pdf(texts)))


def test_a_table_over_pages_has_its_header_on_each() -> None:
    xs = [72.0, 200.0, 300.0]
    header = ["Plan", "Copay", "Deductible"]
    first = grid([header, *([f"Plan A{i}", "$20", "$10"] for i in range(30))], xs)
    second = grid([[f"Plan B{i}", "$20", "$10"] for i in range(3)], xs, top=750)
    texts = blocks(placed_pdf(first, [(72, 780, "Running head"), *second]))
    assert texts[1] == (
        "Running head\n\n| Plan | Copay | Deductible |\n| --- | --- | --- |\n"
        "| Plan B0 | $20 | $10 |\n| Plan B1 | $20 | $10 |\n| Plan B2 | $20 | $10 |"
    )
    captioned = blocks(placed_pdf(first, [(72, 780, "Table 2: others"), *second]))[1]
    assert "Copay" not in captioned


@pytest.mark.parametrize(
    ("n", "above", "rows"),
    [
        (30, "Patients", [["Anna", "61", "170"], ["Bert", "82", "181"]]),
        (30, "", [["Patient", "Weight", "Height"], ["Anna", "61", "170"], ["Bert", "82", "181"]]),
        (5, "", [["Anna", "61", "170"], ["Bert", "82", "181"]]),
    ],
)
def test_a_table_has_no_header_of_another(n: int, above: str, rows: list[list[str]]) -> None:
    xs = [72.0, 200.0, 300.0]
    first = grid([["Product", "Price", "Stock"], *([f"Item {i}", f"{i}.50", "7"] for i in range(n))], xs)
    texts = blocks(placed_pdf([(72, 720, "Prices"), *first], [(72, 720, above), *grid(rows, xs)]))
    assert "| Product | Price | Stock |" in texts[0]
    assert texts[1].removeprefix(f"{above}\n\n").startswith(f"| {' | '.join(rows[0])} |")


def test_a_table_continues_below_the_letterhead_of_each_page() -> None:
    xs = [72.0, 200.0, 300.0]
    head = [(72.0, 760.0 - 20 * i, line) for i, line in enumerate(("ACME Ltd", "1 Main Street", "Springfield"))]
    first = grid([["Item", "Price", "Stock"], *([f"Item A{i}", f"{i}.50", "7"] for i in range(30))], xs)
    second = grid([[f"Item B{i}", f"{i}.50", "7"] for i in range(3)], xs)
    texts = blocks(placed_pdf([*head, *first, (72, 80, "Continued")], [*head, *second, (72, 40, "Page 2")]))
    assert "| Item | Price | Stock |\n| --- | --- | --- |\n| Item B0 | 0.50 | 7 |" in texts[1]


LEFT = (
    "The committee met on the third day of", "the month and agreed on the budget for",
    "the year that follows, without a vote", "against it.",
)  # fmt: skip
RIGHT = (
    "Members who could not be there sent", "their votes by mail, and these were",
    "counted by the secretary on the same", "evening in the hall.",
)  # fmt: skip


@pytest.mark.parametrize("by_line", [False, True])
def test_columns_of_text_stay_text(by_line: bool) -> None:
    left = [(72.0, 700.0 - 12 * i, line) for i, line in enumerate(LEFT * 3)]
    right = [(320.0, 700.0 - 12 * i, line) for i, line in enumerate(RIGHT * 3)]
    texts = [one for pair in zip(left, right, strict=True) for one in pair] if by_line else left + right
    assert not any(line.startswith("|") for text in blocks(placed_pdf(texts)) for line in text.splitlines())


def test_a_table_in_a_column_of_text_is_one() -> None:
    left = [(72.0, 700.0 - 12 * i, line) for i, line in enumerate(LEFT * 3)]
    rows = [["Plan", "Copay", "Rate"], ["Basic", "$20", "10%"], ["Plus", "$10", "5%"], ["Gold", "$5", "1%"]]
    (text,) = blocks(placed_pdf([*left, *grid(rows, [320, 400, 460], top=676)]))
    assert "| Plan | Copay | Rate |\n| --- | --- | --- |\n| Basic | $20 | 10% |" in text
    assert "The committee met on the third day of the month and agreed" in text


@pytest.mark.parametrize("mark", ["-", "1.", "(a)", "iv."])
def test_lists_stay_lists(mark: str) -> None:
    texts = [(x, 700.0 - 14 * i, text) for i in range(6) for x, text in ((72.0, mark), (100.0, f"Item number {i}"))]
    assert "|" not in blocks(placed_pdf(texts))[0]


def test_a_frame_around_text_is_not_a_table() -> None:
    texts = [(80.0, 700.0 - 12 * i, line) for i, line in enumerate(LEFT)]
    (text,) = blocks(placed_pdf(texts, lines=boxes([72, 400], [715, 650])))
    assert text == " ".join(LEFT)


def test_a_drawing_of_a_million_lines_takes_no_time() -> None:
    lines = [(x, 10.0, x, 780.0) for x in range(10, 600, 4)] + [(10.0, y, 600.0, y) for y in range(10, 780, 4)]
    texts = grid([["Plan", "Copay", "Rate"], ["Basic", "$20", "10%"]] * 20, [72, 200, 300])
    assert "Basic" in blocks(placed_pdf(texts, lines=lines * 20))[0]


def test_prose_is_as_it_was() -> None:
    assert blocks(text_pdf(["# Birds\nGrebes dive.\n\nTerns do not."])) == ["# Birds\n\nGrebes dive.\n\nTerns do not."]


@shared
def test_rows_of_public_pdfs_stand_in_tables() -> None:
    names = ("SPARSE-2024-INV-1234_borderless_table", "movie-theater-booking-2024", "normal_4pages")
    # of the second, one is given with two columns as one, and one stands alone; of the third, one lacks a mark
    assert [tables.rows(SHARED / "tables" / f"{name}.pdf") for name in names] == [(20, 20, 20), (23, 25, 25), (4, 4, 5)]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_places_no_word_is_lost_or_in_two_tables(seed: int) -> None:
    random = Random(seed)
    places: list[tuple[str, float, float, float, float, int]] = []
    for i in range(random.choice([3, 30, 300])):
        x = random.choice([random.uniform(0, 600), 50.0 * random.randrange(12)])
        y = random.choice([random.uniform(0, 800), 12.0 * random.randrange(60)])
        places.append(
            (random.choice(["a", "word", "•", "長い"]), x, x + random.choice([-5, 0, 9, 40]), y, 10.0, i // 3)
        )

    def lines() -> list[Ruling]:
        found = []
        for _ in range(random.choice([0, 5, 60])):
            low = 40.0 * random.randrange(10)
            found.append(Ruling(30.0 * random.randrange(20), low, low + random.choice([10, 100, 500])))
        return found

    words = [Word(*place) for place in places]
    tables = find_tables(words, lines(), lines(), lambda text, more: f"{text} {more}")
    held = [id(word) for table in tables for word in table.words]
    assert len(held) == len(set(held))
    for table in tables:
        assert len({len(row) for row in table.rows}) == 1
        text = " ".join([table.title, *(cell for row in table.rows for cell in row)])
        assert all(word.text in text for word in table.words)


def test_a_header_keeps_its_words_and_takes_no_figures() -> None:
    """Where two columns stand so near one another that they are one to the reader."""
    texts = [(72, 700, "Employee"), (176, 700, "Hours"), (225, 700, "Pay")]
    for i, row in enumerate([("Anna Smith", "40", "800.00"), ("Bert Long", "35", "647.00"), ("Cy", "88", "200.00")]):
        texts += [(x, 685 - 15 * i, text) for x, text in zip((72, 200, 214), row, strict=True)]
    (text,) = blocks(placed_pdf(texts))
    assert text.splitlines() == [
        "| Employee | Hours Pay |",
        "| --- | --- |",
        "| Anna Smith | 40 800.00 |",
        "| Bert Long | 35 647.00 |",
        "| Cy | 88 200.00 |",
    ]


@pytest.mark.parametrize(
    ("names", "dense", "others"),
    [
        (["No", "Net sales", "Cost"], ["118,534,534,534.64", "113,016,520,100.20"], ["355.69", "1,789.14"]),
        (["No", "Town", "Colour"], ["Llanfairpwllgwyngyll", "lightgoldenrodyellow"], ["Bonn", "red"]),
    ],
)
def test_records_are_rows_if_only_those_below_show_the_columns(
    names: list[str], dense: list[str], others: list[str]
) -> None:
    """Where the first ones leave so little white that they could be text."""
    rows = [[f"{i % 9 + 1}", *(dense if i < 16 else others)] for i in range(18)]
    (text,) = blocks(placed_pdf([*grid([names], [72, 91, 192], top=715), *grid(rows, [72, 88, 192])]))
    assert text.splitlines()[2:] == [f"| {' | '.join(row)} |" for row in rows]


def test_records_above_a_line_are_rows() -> None:
    rows = [
        ["Random", "7", "47.0"],
        ["Dense", "7", "50.0"],
        ["Gold", "7", "42.6"],
        ["Both", "9", "51.5"],
        ["None", "9", "3.2"],
    ]
    (text,) = blocks(placed_pdf(grid(rows, [72, 200, 300]), lines=[(72, 667, 330, 667)]))
    first, _, *others = text.splitlines()
    assert [first, *others] == [f"| {' | '.join(row)} |" for row in rows]


@pytest.mark.parametrize(
    "rows",
    [
        [["Lamp", "7", "47.00"], ["Tent", "12", "3.20"], ["Rope", "9", "1,250.00"]],
        [["Lamp", "red", "old"], ["Tent", "green", "new"], ["Rope", "blue", "old"]],
        [["1", "2.5"], ["2", "7.1"], ["3", "8.9"]],
    ],
)
def test_names_of_columns_may_stand_beside_the_values(rows: list[list[str]]) -> None:
    """As centred ones above short values in wide columns do."""
    names = ["Item", "Unit price", "Quantity"][: len(rows[0])]
    n = len(names)
    (text,) = blocks(placed_pdf([*grid([names], [110, 240, 370][:n], top=720), *grid(rows, [72, 200, 330][:n])]))
    first, _, *others = text.splitlines()
    assert [first, *others] == [f"| {' | '.join(row)} |" for row in (names, *rows)]


def ruled(rows: list[list[tuple[str, int, int]]]) -> str:
    """The text of a ruled table of cells: text, columns and rows that it goes over."""
    width = sum(columns for _, columns, _ in rows[0])
    texts: list[Text] = []
    lines: list[tuple[float, float, float, float]] = []
    taken: set[tuple[int, int]] = set()
    for i, row in enumerate(rows):
        column = 0
        for text, columns, deep in row:
            column = next(x for x in range(column, width) if (i, x) not in taken)
            taken |= {(i + y, column + x) for x in range(columns) for y in range(deep)}
            left, right, top, bottom = (
                70 + 70 * column,
                70 + 70 * (column + columns),
                700 - 20 * i,
                700 - 20 * (i + deep),
            )
            texts.append((left + 4, (top + bottom) / 2 - 4, text))
            lines += boxes([left, right], [top, bottom])
    (found,) = blocks(placed_pdf(texts, lines=lines))
    return found


@pytest.mark.parametrize(
    ("rows", "read"),
    [
        (
            [[("Item", 1, 1), ("Price", 2, 1)], [("Lamp", 1, 1), ("EUR", 1, 1), ("19.90", 1, 1)],
             [("Tent", 1, 1), ("USD", 1, 1), ("305.00", 1, 1)], [("Rope", 1, 1), ("EUR", 1, 1), ("12.50", 1, 1)]],
            ["Item | Price | ", "Lamp | EUR | 19.90", "Tent | USD | 305.00", "Rope | EUR | 12.50"],
        ),
        (
            [[("", 1, 1), ("Sales", 2, 1)], [("North", 1, 1), ("12", 1, 1), ("15", 1, 1)],
             [("South", 1, 1), ("8", 1, 1), ("7", 1, 1)], [("West", 1, 1), ("101", 1, 1), ("9", 1, 1)]],
            [" | Sales | ", "North | 12 | 15", "South | 8 | 7", "West | 101 | 9"],
        ),
        (
            [[("Name", 1, 1), ("Anna Smith", 3, 1)], [("Born", 1, 1), ("1990", 1, 1), ("in", 1, 1), ("Rome", 1, 1)],
             [("Street", 1, 1), ("Main", 1, 1), ("City", 1, 1), ("Bonn", 1, 1)], [("Remarks", 1, 1), ("none", 3, 1)]],
            ["Name | Anna Smith |  | ", "Born | 1990 | in | Rome", "Street | Main | City | Bonn",
             "Remarks | none |  | "],
        ),
        (
            [[("North", 1, 3), ("Lamps", 1, 1), ("red", 1, 1)], [("Tents", 1, 1), ("green", 1, 1)],
             [("Ropes", 1, 1), ("blue", 1, 1)], [("South", 1, 2), ("Lamps", 1, 1), ("red", 1, 1)],
             [("Tents", 1, 1), ("grey", 1, 1)]],
            ["North | Lamps | red", "North | Tents | green", "North | Ropes | blue", "South | Lamps | red",
             "South | Tents | grey"],
        ),
        (
            [[("Region", 1, 3), ("Sales", 4, 1)], [("2023", 2, 1), ("2024", 2, 1)],
             [("1", 1, 1), ("2", 1, 1), ("1", 1, 1), ("2", 1, 1)],
             [("North", 1, 1), *((text, 1, 1) for text in ("5", "6", "7", "8"))],
             [("South", 1, 1), *((text, 1, 1) for text in ("3", "4", "9", "0"))]],
            ["Region | Sales 2023 1 | Sales 2023 2 | Sales 2024 1 | Sales 2024 2", "North | 5 | 6 | 7 | 8",
             "South | 3 | 4 | 9 | 0"],
        ),
        (
            [[("Name", 2, 1), ("Price", 1, 1)], [("Anna", 1, 1), ("Smith", 1, 1), ("5.00", 1, 1)],
             [("Bert", 1, 1), ("Long", 1, 1), ("7.50", 1, 1)], [("Cy", 1, 1), ("Short", 1, 1), ("9.00", 1, 1)]],
            ["Name |  | Price", "Anna | Smith | 5.00", "Bert | Long | 7.50", "Cy | Short | 9.00"],
        ),
        (
            [[("Wages", 2, 1), ("Allowances", 2, 1)],
             [("from", 1, 1), ("below", 1, 1), ("0", 1, 1), ("1", 1, 1)],
             [("10", 1, 1), ("20", 1, 1), ("5", 1, 1), ("6", 1, 1)],
             [("20", 1, 1), ("30", 1, 1), ("7", 1, 1), ("8", 1, 1)]],
            ["Wages from | Wages below | Allowances 0 | Allowances 1", "10 | 20 | 5 | 6", "20 | 30 | 7 | 8"],
        ),
        (
            [[("Region", 1, 3), ("Sales", 2, 1)], [("2023", 1, 1), ("2024", 1, 1)], [("EUR", 1, 1), ("EUR", 1, 1)],
             [("North", 1, 1), ("5", 1, 1), ("6", 1, 1)], [("South", 1, 1), ("3", 1, 1), ("4", 1, 1)]],
            ["Region | Sales 2023 EUR | Sales 2024 EUR", "North | 5 | 6", "South | 3 | 4"],
        ),
        (
            [[("", 1, 1), ("Sales", 2, 1)], [("Region", 1, 1), ("2023", 1, 1), ("2024", 1, 1)],
             [("North", 1, 1), ("12", 1, 1), ("15", 1, 1)], [("South", 1, 1), ("8", 1, 1), ("7", 1, 1)]],
            ["Region | Sales 2023 | Sales 2024", "North | 12 | 15", "South | 8 | 7"],
        ),
    ],
)  # fmt: skip
def test_rows_of_a_header_divide_cells_over_several_columns(
    rows: list[list[tuple[str, int, int]]], read: list[str]
) -> None:
    first, _, *others = ruled(rows).splitlines()
    assert [first, *others] == [f"| {row} |" for row in read]


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_is_read_from_the_right(is_beside: bool) -> None:
    """Lines of a paragraph end at the left, columns begin at the right; lam and alef of one glyph keep their order."""
    lines = ["وعليه فإن السلام على الأرض", "خلال المرحلة المقبلة من", "الأهداف الإنسانية"]
    (text,) = blocks(right_to_left_pdf([[(500, line)] for line in lines], is_beside=is_beside))
    assert text == " ".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "التاريخ 12/05/2024 ورقم INV-1001 من البرنامج",
        "البرنامج Microsoft Word 2016 من (المرحلة) 7(ب).",
        "הטלפון 03-1234567, אחוז 15.5%, טווח 10-20 ימים.",
        "[ראה (א)] של הדבר (ABC 5) ועוד {5} דברים",
        "א) ראשון של הרשימה עולה $5",
    ],
)
def test_names_numbers_and_brackets_between_what_is_read_from_the_right(line: str) -> None:
    drawn = re.sub(r"[A-Z$\d](?:[ -~]*[A-Za-z\d])?%?", lambda run: run[0][::-1], line)
    assert blocks(right_to_left_pdf([[(500, drawn)]])) == [line]


@pytest.mark.parametrize(("drawn", "read"), [("05.6-", "-6.50"), ("-05.6", "-6.50"), ("%51", "15%"), ("51%", "15%")])
def test_the_sign_of_a_number_on_either_side(drawn: str, read: str) -> None:
    assert blocks(right_to_left_pdf([[(500, f"المرحلة {drawn} من البرنامج")]])) == [f"المرحلة {read} من البرنامج"]


def test_a_table_that_is_read_from_the_right() -> None:
    rows = [["البرنامج", "السعر", "ملاحظات"], ["الأول", "مائة", "للمالية"], ["الثاني", "ثلاثمائة", "للإدارة فقط"]]
    (text,) = blocks(right_to_left_pdf([list(zip([450, 300, 150], row, strict=True)) for row in rows]))
    assert text.splitlines() == [
        "| البرنامج | السعر | ملاحظات |",
        "| --- | --- | --- |",
        "| الأول | مائة | للمالية |",
        "| الثاني | ثلاثمائة | للإدارة فقط |",
    ]


def test_words_beyond_any_page_are_not_looked_at() -> None:
    texts = grid([["Plan", "Copay", "Rate"], ["Basic", "$20", "10%"]], [72, 200, 300])
    content = placed_pdf([*texts, (1e30, 700, "far"), (72, 1e30, "high")], lines=[(0, 0, 1e30, 0), (0, 0, 0, 1e30)])
    assert "| Basic | $20 | 10% |" in blocks(content)[0]
