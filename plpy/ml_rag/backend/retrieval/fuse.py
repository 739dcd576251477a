"""What several arms have found, as one list."""

from __future__ import annotations

from ml_rag.backend.retrieval.arms import DISTANCE, WORDS
from ml_rag.backend.retrieval.rows import NAMES, Rows, nearest
from ml_rag.backend.retrieval.shape import Shape

#: so many of its best candidates say how clear an arm is
CLEAR_BY = 30


def parts(shape: Shape, rows: Rows, of_documents: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """The common table expressions, the last of which is ``ranked``: each candidate once, with its score of 0-1.
    ``of_documents``: arms and stores whose nodes are of no single segment."""
    found = []
    for place, arm in enumerate(shape.arms, 1):
        columns = [f"{place} AS arm", "place", "value", "store", "row_key", *NAMES]
        columns += ["segment", "metadata"] if rows.has_text else []
        columns += list(rows.node_columns)
        columns += ["distance", f"{'score' if arm.unit == WORDS else 'NULL::float8'} AS keyword_score"]
        if shape.fusion == "auto":
            columns.append("bytes" if shape.reads_bytes(arm) else "NULL::integer AS bytes")
        found.append(f"SELECT {', '.join(columns)} FROM {arm.expression}")
    made = [("found AS MATERIALIZED", "\n  UNION ALL ".join(found))]
    name = "found"
    if "node_key" in rows.node_columns:
        made.append(("noded AS MATERIALIZED", _noded(of_documents)))
        name = "noded"
    if shape.fusion == "rrf":
        k = rows.slots("rrf_k", "float8")
        weights = _ranks_weights(shape, rows)
        score = f"sum(w.weight / ({k} + f.place)) * ({k} + 1)"
        tables = f"{name} AS f JOIN (VALUES {weights}) AS w (arm, weight) USING (arm)"
        return [*made, ("ranked AS", _ranked(score, f"w.weight / ({k} + f.place)", tables, "", rows))]
    made += [("strength AS", _strength(shape, rows)), ("weight AS MATERIALIZED", _weight(shape, rows))]
    # a distance that each candidate has counts for all
    made.append(
        (
            "known AS MATERIALIZED",
            "SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0",
        )
    )
    similarity = f"({rows.similarity('min(f.distance)')})::float8"
    own = "CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END"
    score = (
        f"CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, {similarity}) / k.best) ELSE 0 END"
        f" + coalesce(sum({own}), 0)"
    )
    tables = f"{name} AS f JOIN weight AS w USING (arm), known AS k"
    return [*made, ("ranked AS", _ranked(score, own, tables, ", k.weight, k.best", rows))]


def _ranks_weights(shape: Shape, rows: Rows) -> str:
    """How much each arm counts in reciprocal rank fusion: as the call says, else the same; parts count the same."""
    parts = [arm.part for arm in shape.arms]
    weights = []
    for place, arm in enumerate(shape.arms, 1):
        equal, share = 1 / parts.count(arm.part), 1 / len(set(parts))
        given = rows.slots(f"weight_{place}", "float8")
        weights.append(f"({place}, {share!r} * coalesce({given}, {equal!r}))")
    return ", ".join(weights)


def _noded(of_documents: list[tuple[int, int]]) -> str:
    """What was found, where nodes are hits: what an arm gives a segment it gives each node of it that was found."""
    others = "".join(f" AND NOT (arm = {place} AND store = {i})" for place, i in of_documents)
    nodes = f"SELECT DISTINCT store, row_key, node_key FROM found WHERE node_key IS NOT NULL{others}"
    return (
        f"SELECT f.*, coalesce(f.node_key, n.node_key) AS hit_key FROM found AS f\n"
        f"  LEFT JOIN ({nodes}) AS n ON f.node_key IS NULL AND n.store = f.store AND n.row_key = f.row_key"
    )


def _ranked(score: str, own: str, tables: str, also: str, rows: Rows) -> str:
    """``own``: what an arm adds to the score. Of several texts of a row, that of the arm which adds most; of several
    nodes the nearest."""
    columns = ", ".join(f"min(f.{name}) AS {name}" for name in NAMES)
    order = f"ORDER BY coalesce({own}, f.value * w.weight) DESC, f.arm" if also else f"ORDER BY {own} DESC, f.arm"
    if rows.has_text:
        for name in ("segment", "metadata"):
            columns += f", (array_agg(f.{name} {order}) FILTER (WHERE f.{name} IS NOT NULL))[1] AS {name}"
    nodes = rows.node_columns
    if nodes:
        columns += ", (array_agg(f.node ORDER BY f.node_distance NULLS LAST, f.arm)"
        columns += " FILTER (WHERE f.node IS NOT NULL))[1] AS node"
        columns += ", min(f.node_distance) AS node_distance"
    distance = nearest("min(f.distance)", "min(f.node_distance)", nodes)
    key = ", f.hit_key" if "node_key" in nodes else ""
    return (
        f"SELECT f.store, f.row_key, {columns}, {distance} AS distance, max(f.keyword_score) AS keyword_score,\n"
        f"    {score} AS score\n  FROM {tables}\n  GROUP BY f.store, f.row_key{key}{also}"
    )


def _strength(shape: Shape, rows: Rows) -> str:
    """What each arm gives its best candidate, and how clearly it tells its best candidates from the others, 0-1: one
    minus the mean of the best thirty, where the first counts 1 and those missing 0. By meaning the last one counts as
    0. An arm that has something to say gives a few rows much more than the rest; one that has not (a model that does
    not know the language, words that stand everywhere) gives all about the same. Vectors of texts that the model has
    cut count by the third power of the share that it has read."""
    best = "SELECT arm, max(value) AS best{} FROM found GROUP BY arm"
    if shape.fusion == "weighted":
        return best.format("")
    limit = rows.slots("read_bytes", "float8")
    if others := [place for place, arm in enumerate(shape.arms, 1) if arm.has_embedding]:
        cases = " ".join(f"WHEN {place} THEN {rows.slots(f'read_bytes_{place}', 'float8')}" for place in others)
        limit = f"CASE arm {cases} ELSE {limit} END"
    read = f"coalesce(avg(least(1, {limit} / nullif(bytes, 0))), 1)"
    best = best.format(f", min(value) AS least, {read} AS read")
    floors = [str(place) for place, arm in enumerate(shape.arms, 1) if arm.kind.has_floor]
    nothing = f"CASE WHEN arm IN ({', '.join(floors)}) THEN least ELSE 0 END" if floors else "0::float8"
    return (
        "SELECT b.arm, b.best, coalesce(\n"
        f"      1 - sum(greatest(f.value - b.nothing, 0) / nullif(b.best - b.nothing, 0)) / {CLEAR_BY}, 0)"
        " * power(b.read, 3) AS clear\n"
        f"  FROM (SELECT arm, best, read, {nothing} AS nothing FROM ({best}) AS b) AS b\n"
        f"    JOIN found AS f ON f.arm = b.arm AND f.place <= {CLEAR_BY}\n"
        "  GROUP BY b.arm, b.best, b.read, b.nothing"
    )


def _weight(shape: Shape, rows: Rows) -> str:
    """How much each arm counts: by how clear all of its part are, or as the call says; the weights of a part are 1 in
    all, and each part has its share."""
    families = [(arm.part, arm.kind.family) for arm in shape.arms]
    arms = []
    for place, arm in enumerate(shape.arms, 1):
        equal = 0.5 / families.count((arm.part, arm.kind.family))
        given = f"{equal!r}::float8" if shape.fusion == "auto" else rows.slots(f"weight_{place}", "float8")
        share = "1::float8" if len({part for part, _ in families}) == 1 else rows.slots(f"share_{place}", "float8")
        is_known = str(arm.unit == DISTANCE).lower()
        # of shares that were divided the last one is what is left
        is_last = shape.fusion == "auto" and place == max(
            other for other, one in enumerate(shape.arms, 1) if one.part == arm.part
        )
        arms.append(f"({place}, {arm.part}, {given}, {share}, {is_known}, {str(is_last).lower()})")
    values = f"(VALUES {', '.join(arms)}) AS a (arm, part, given, share, is_known, is_last)"
    columns = "a.arm, a.part, a.share, a.is_known, a.is_last, s.best"
    by = "a.given * coalesce(s.clear, 0)" if shape.fusion == "auto" else "a.given"
    return (
        "SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0)"
        " ELSE weight END AS weight\n"
        f"  FROM (SELECT {columns}, CASE WHEN sum({by}) OVER part > 0 THEN {by} / sum({by}) OVER part\n"
        "      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight\n"
        f"    FROM {values} LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a\n"
        "  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    )
