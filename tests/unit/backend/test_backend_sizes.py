"""backend/tree, backend/sizes, backend/names: what a parse tree tells, and which names a statement may have."""

from __future__ import annotations

from ml_rag.backend import names, sizes, tree

CONSTANT = "{CONST :consttype 25 :consttypmod -1 :constlen -1 :constbyval false :constisnull false :constvalue %s}"


def test_a_name_that_looks_like_a_label_is_a_name() -> None:
    (query,) = tree.parse(r"({QUERY :resname :relid :name a\ \{B :list (i 1 2) :value 3 [ 1 2 ] :node {X :y <>}})")
    assert dict(query) == {
        "resname": ":relid", "name": r"a\ \{B", "list": ["i", "1", "2"], "value": ["3", "[", "1", "2", "]"],
        "node": {"y": "<>"},
    }  # fmt: skip
    assert (query.kind, query["node"].kind) == ("QUERY", "X")


def test_a_width_of_a_format() -> None:
    for text, is_wide in {
        "%s %5s %-10s": False, "100%%99999s": False, "%9999s": False, "%1$9999s": False,
        "%99999s": True, "%1$99999s": True, "%-99999s": True, "%*s": True, "%1$*2$s": True, "%-*s": True,
    }.items():  # fmt: skip
        value = f"{len(text) + 4} [ 0 0 0 0 {' '.join(str(byte) for byte in text.encode())} ]"
        (node,) = tree.parse(f"({CONSTANT % value})")
        assert sizes._has_width(node) == is_wide, text


def test_the_limits_of_a_product() -> None:
    """The pattern of LIKE on a column: 433 bytes at most."""
    column = "{VAR :varno 1 :varattno 1 :vartype 25 :vartypmod -1 :varlevelsup 0}"
    for n, is_refused in ((433, False), (434, True)):
        pattern = CONSTANT % f"{n + 4} [ {'0 ' * (n + 4)}]"
        like = f"{{OPEXPR :opfuncid 850 :opresulttype 16 :args ({column} {pattern})}}"
        query = f"({{QUERY :rtable ({{RTE :rtekind 0}}) :x {like}}})"
        (parsed,) = tree.parse(query)
        assert sizes.functions(parsed) == [850]
        assert (sizes.check(parsed, {850: "textlike(text, text)"}) is not None) == is_refused
        assert sizes.check(parsed, {850: "texteq(text, text)"}) is None


def test_depth_is_an_answer_too() -> None:
    deep = "{COLLATEEXPR :arg " * 5000 + "{CASETESTEXPR :x 1}" + "}" * 5000
    query = f"({{QUERY :x {{OPEXPR :opfuncid 850 :opresulttype 16 :args ({deep} {deep})}}}})"
    (parsed,) = tree.parse(query)
    assert sizes.check(parsed, {850: "textlike(text, text)"}) == "it is too deeply nested, or too long"


def test_names() -> None:
    found = names.names_in('SELECT a.B, "c ""d", $x$e$x$f FROM "" É')
    assert {"a", "b", 'c "d', "f", "é", "É"} <= set(found)
    assert "" not in found
    implied = set(names.operators_in("1"))
    assert {"~~", "<>", "="} <= implied
    assert set(names.operators_in("1 <=>-2")) == implied | {"-", "<=>", "<=>-", "=>", "=>-", ">-"}


def test_names_of_hostile_length_take_no_time() -> None:
    for text in ('"' * 20_000, "$" + "a$" * 10_000, "-+" * 10_000, "a" * 20_000, '"a' * 10_000):
        assert len(names.names_in(text)) <= 20_001
        assert len(names.operators_in(text)) < 200
