"""durations.py REPORT…: the slowest files of tests, and the closing line of pytest, over one or more of its reports
(--junitxml). `make test` writes build/test.xml, `make test-rest` build/test-rest.xml and `make test-all`
build/test-all.xml."""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

_SHOWN = 10
#: element in a test -> what pytest counts it as
_COUNTED = {"failure": "failed", "skipped": "skipped", "error": "errors"}


def main(paths: list[str]) -> None:
    seconds: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    wall = 0.0
    for path in paths:
        for suite in ElementTree.parse(path).iter("testsuite"):  # noqa: S314 - pytest's own
            wall += float(suite.attrib["time"])
            for test in suite.iter("testcase"):
                seconds[test.get("file", "")] += float(test.attrib["time"])
                outcomes[next((_COUNTED[found.tag] for found in test if found.tag in _COUNTED), "passed")] += 1
    print(f"Seconds of the {_SHOWN} slowest files of tests:")
    for file, took in seconds.most_common(_SHOWN):
        print(f"{took:8.1f}  {file}")
    told = [f"{outcomes[name]} {name}" for name in ("failed", "passed", "skipped", "errors") if outcomes[name]]
    print(f" {', '.join(told)} in {wall:.2f}s ".center(80, "="))


if __name__ == "__main__":
    main(sys.argv[1:])
