"""What the pinned packages are known for: vulnerabilities (pip-audit) and licences (pip-licenses). Run by `make check`.

Status 1 if a version in mk/constraints.txt has a known vulnerability that is not accepted below, or a package is
under a licence that would bind its users. If the index has no vulnerability data, it says so and continues.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

#: id of a vulnerability -> why it does not concern us or cannot be mended yet, and until when that is believed
ACCEPTED: dict[str, tuple[str, datetime.date]] = {}

#: tools that are run and never shipped, so that their licence binds no user -> what they are for
TOOLS = {
    "pglast": "pgspot, of make check, parses SQL with it",
    "atheris": "guides make fuzz-test; Apache 2.0, says its project",
}
_COPYLEFT = re.compile(r"(?<![A-Z])A?GPL|(?<!Lesser )General Public License|Affero", re.IGNORECASE)


def vulnerabilities() -> list[str]:
    """What is wrong, a line each."""
    command = [str(BIN / "pip-audit"), "--requirement", str(ROOT / "mk/constraints.txt"), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        told = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        print(f"not audited: the vulnerability data cannot be reached ({told[:200]})")
        return []
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        print("not audited: this index has no vulnerability data of any of the packages")
        return []
    if skipped:
        print(f"not audited, as the index has no data of them: {', '.join(skipped)}")
    print(f"{len(packages) - len(skipped)} packages audited")
    wrong = []
    for package in packages:
        for found in package.get("vulns", ()):
            names = {found["id"], *found.get("aliases", ())}
            why, until = next((ACCEPTED[name] for name in names if name in ACCEPTED), ("", datetime.date.min))
            if datetime.date.today() > until:
                fixed = ", ".join(found.get("fix_versions", ())) or "no version yet"
                wrong.append(f"{package['name']} {package['version']}: {', '.join(sorted(names))}; mended in {fixed}")
            else:
                print(f"accepted until {until}: {package['name']} {found['id']}: {why}")
    return wrong


def shipped(name: str = "ml-rag", extras: tuple[str, ...] = ("server", "torch")) -> set[str]:
    """The packages that come with the product, by their normalized names: what it requires, and what those do."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        package, wanted = waiting.pop()
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
                continue
            key = canonicalize_name(requirement.name)
            found.add(key)
            more = {(key, "")} | {(key, extra) for extra in requirement.extras}
            waiting += more - seen
            seen |= more
    return found


def is_binding(licence: str) -> bool:
    """Whether all that a licence leaves to choose are of the (Affero) General Public License; the Lesser one is not."""

    def binds(part: str) -> bool:
        return _COPYLEFT.search(part) is not None and " WITH " not in part

    choices = re.split(r"\s+OR\s+|;", licence)
    return all(any(map(binds, re.split(r"\s+AND\s+", choice))) for choice in choices)


def licences() -> list[str]:
    """What is wrong, a line each."""
    command = [str(BIN / "pip-licenses"), "--format", "json", "--from", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - a fixed command
    ours = shipped()
    wrong = []
    for package in json.loads(done.stdout):
        name = canonicalize_name(package["Name"])
        if name in TOOLS and name not in ours:
            continue
        told = [package[key] for key in ("License-Expression", "License-Classifier", "License-Metadata")]
        licence = next((text.strip() for text in told if text and text.strip() not in ("", "UNKNOWN")), "")
        if not licence:
            wrong.append(f"{name} {package['Version']} does not say under which licence it is")
        elif is_binding(licence.splitlines()[0]):
            wrong.append(f"{name} {package['Version']} is under {licence.splitlines()[0][:100]}")
    print(f"{len(ours)} packages come with the product")
    return wrong


def main() -> int:
    wrong = vulnerabilities() + licences()
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
