"""backend/documents: which documents a question names."""

from __future__ import annotations

import json
import random
import time
import tracemalloc

import pytest

from ml_rag.backend.documents import BATCH, CHARACTERS, LONGEST_NAME, LONGEST_QUESTION, _Names, named
from support.shared_data import SHARED, shared

DOCUMENTS = [
    ("/srv/docs/hr/employee_handbook.pdf", ["Employee Handbook of Contoso"]),
    ("/srv/docs/hr/PerksPlus.pdf", []),
    ("/srv/docs/2023/report.pdf", ["Annual Report"]),
    ("/srv/docs/2024/report.pdf", ["Annual Report"]),
    ("/srv/docs/plans/Health_Plus_Benefits.docx", ["Health Plus Plan"]),
    ("/srv/docs/plans/Health_Standard_Benefits.docx", ["Health Standard Plan"]),
    ("notes", ["Minutes of the board meeting"]),
    ("/srv/docs/Grüße.md", []),
]
HANDBOOK, PERKS, REPORT_23, REPORT_24, PLUS, STANDARD, NOTES, GREETINGS = (name for name, _ in DOCUMENTS)


@pytest.mark.parametrize(
    ("question", "names"),
    [
        # rows of a table are named by their keys: numbers of a condition are none
        ("a waterproof jacket under 100", []),
        ("from 2 to 100 dollars", []),
        ("the 45", []),
        ("tents: 2 people", []),
        ("what does the 45 document say?", ["shop.items/45"]),
        ("summarize 45", ["shop.items/45"]),
        ("what is shop.items/45?", ["shop.items/45"]),
    ],
)
def test_a_number_is_no_name(question: str, names: list[str]) -> None:
    assert named(question, [(f"shop.items/{key}", []) for key in range(1, 101)]).names == names


@pytest.mark.parametrize(
    ("question", "names"),
    [
        # with and without ending, in any case, whatever stands between the words
        ("Summarize perksplus.pdf", [PERKS]),
        ("what is in PERKS-PLUS.PDF?", [PERKS]),
        ("perks plus pdf, what is not covered", [PERKS]),
        ("does PerksPlus pay for diving?", [PERKS]),
        ("EMPLOYEE_HANDBOOK.PDF on holidays", [HANDBOOK]),
        ("what does the employee handbook say on holidays?", [HANDBOOK]),
        ("grüße.MD", [GREETINGS]),
        # titles
        ("who came, by the minutes of the board meeting?", [NOTES]),
        ("who came, by the document Minutes of the Board Meeting?", [NOTES]),
        # parts of paths; the longest that is no longer ambiguous
        ("what grew, by 2024/report.pdf?", [REPORT_24]),
        ("what grew, by docs/2023/report?", [REPORT_23]),
        ("/srv/docs/2023/report.pdf", [REPORT_23]),
        ("compare 2024/report.pdf with 2023/report.pdf", [REPORT_24, REPORT_23]),
        ("what grew, by report.pdf?", []),
        ("what do the report pdfs say?", [REPORT_23, REPORT_24]),
        # parts of names, where the question speaks of documents
        ("deductible in the Standard plan document", [STANDARD]),
        ("what do both plan documents say on emergencies?", [PLUS, STANDARD]),
        ("what does the plan document say on emergencies?", []),
        ("handbook: how do I report something?", [HANDBOOK]),
        ("summarise the handbook, please", [HANDBOOK]),
        ("tl;dr of the handbook", [HANDBOOK]),
        ("key points of the Health Plus plan document", [PLUS]),
        # several
        ("when were the employee handbook and PerksPlus.pdf last changed?", [HANDBOOK, PERKS]),
        # what only seems to name one
        ("what perks does a director get, plus where do they work?", []),
        ("how do I report something?", []),
        ("does the plan cover a report to the board?", []),
        ("write some notes", []),
        ("summarise what was decided", []),
        ("", []),
        ("???", []),
    ],
)
def test_what_a_question_names(question: str, names: list[str]) -> None:
    assert named(question, DOCUMENTS).names == names


@pytest.mark.parametrize(
    ("question", "is_summary"),
    [
        ("Summarize perksplus.pdf", True),
        ("please give me a short summary of the employee handbook.", True),
        ("TL;DR: PerksPlus.pdf", True),
        ("summarise this document", True),
        ('Summarize the document called "perksplus.pdf"', True),
        ("Summarise the file named perksplus.pdf, please", True),
        ("Give me a summary of the document which is titled “PerksPlus”.", True),
        ("Summarize what is called diving in perksplus.pdf", False),
        ("Summarize", True),
        ("overview of both plan documents", True),
        ("what are the key points of the handbook?", False),
        ("summarise what PerksPlus.pdf says about diving", False),
        ("summarise the leave policy of the employee handbook", False),
        ("what is in perksplus.pdf?", False),
    ],
)
def test_what_asks_for_nothing_but_a_summary(question: str, is_summary: bool) -> None:
    assert named(question, DOCUMENTS).is_summary == is_summary


@shared
def test_every_question_of_the_public_set() -> None:
    titles = {
        "Benefit_Options.pdf": "Plan and Benefit Packages",
        "Northwind_Health_Plus_Benefits_Details.pdf": "Northwind Health Plus Plan",
        "Northwind_Standard_Benefits_Details.pdf": "Northwind Health Standard Plan",
        "PerksPlus.pdf": "PerksPlus Health and Wellness Reimbursement Program for Contoso Electronics Employees",
        "employee_handbook.pdf": "Contoso Electronics Employee Handbook",
        "role_library.pdf": "Roles Descriptions at Contoso Electronics",
    }
    documents = [(name, [title]) for name, title in titles.items()]
    lines = (SHARED / "northwind" / "structured.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        found = named(line["question"], documents)
        assert sorted(found.names) == sorted(line["documents"]), line["question"]
        assert found.is_summary == (not line["question_rest"]), line["question"]


def test_names_that_are_no_words_and_very_long_questions() -> None:
    assert named("what is ??? in ---", [("???", []), ("---", ["***"]), ("", [""])]).names == []
    assert named("a " * 100_000 + "perksplus.pdf", DOCUMENTS).names == []
    assert named("perksplus.pdf " * 1000, DOCUMENTS).names == [PERKS]


def test_many_documents_are_looked_through_with_interrupts() -> None:
    rng = random.Random(1)
    names = [f"/srv/{rng.randrange(10**6)}/file_{i}.pdf" for i in range(5000)]
    looked: list[int] = []
    found = named("what is in FILE 4321.pdf?", [(n, []) for n in names], lambda: looked.append(1))
    assert found.names == [names[4321]]
    assert len(looked) == 5000 // BATCH + 6


def test_a_name_without_end_costs_no_more_than_others() -> None:
    """Anybody may have given it: who asks neither waits for it nor keeps all its parts."""
    names = _Names()
    names.add(0, "a/b " * 100_000, ["c " * 150])
    assert len(names.always) + len(names.ordinary) <= 2 * LONGEST_NAME + 2
    assert all(len(name) <= CHARACTERS for name in names.always)
    looked: list[int] = []
    named("what does the plan say", [("a/" * 10_000, [])] * 1000, lambda: looked.append(1))
    assert len(looked) >= 10 + 5


@pytest.mark.parametrize(
    "question",
    [
        " " * 100_000 + "x",
        " \n" * 100_000 + "x",
        "summarize" + " " * 100_000 + "x ?",
        "summarize " + ". " * 100_000 + "x",
        "summarize " + ". " * 1990 + "x",
        "please can you " * 250 + "x",
        "a-" * 100_000,
        "policy document " * 200,
    ],
)
def test_no_question_takes_long(question: str) -> None:
    """Nothing can end Python between two looks at interrupts, not even an administrator."""
    began = time.process_time()
    last, longest = began, 0.0

    def look() -> None:
        nonlocal last, longest
        now = time.process_time()
        last, longest = now, max(longest, now - last)

    named(question, [(f"a{i} b c d e f g h policy", []) for i in range(2000)], look)
    look()
    assert longest < 2
    assert last - began < 5


def test_blanks_in_a_question_do_not_matter() -> None:
    found = named(" \t Summarize \n\n the   employee handbook \n please. ", DOCUMENTS)
    assert (found.names, found.is_summary) == ([HANDBOOK], True)
    # a label ends with its line
    assert named("plans\nrole: who?", [("plans role", [])]).names == []
    assert named("plans role: who?", [("plans role", [])]).names == ["plans role"]


def test_a_long_question_asks_for_no_summary() -> None:
    longest = "summarize perksplus.pdf" + "!" * (LONGEST_QUESTION - 23)
    assert named(longest, DOCUMENTS).is_summary
    assert not named(longest + "!", DOCUMENTS).is_summary
    assert named(longest + "!", DOCUMENTS).names == [PERKS]


def test_the_last_folders_of_a_long_path_count() -> None:
    assert named("see plans/handbook.pdf", [("x/" * 2000 + "plans/handbook.pdf", [])]).names == [
        "x/" * 2000 + "plans/handbook.pdf"
    ]


def test_names_of_very_many_words_take_few_bytes_for_each() -> None:
    title = " ".join(chr(0x4E00 + i) for i in range(150))
    names = _Names()
    tracemalloc.start()
    for i in range(200):
        names.add(i, f"{i}.txt", [title])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 8 of the name's own list, 9 of those by words; with a string and an entry for each word it was 155
    assert taken < 200 * 150 * 40
