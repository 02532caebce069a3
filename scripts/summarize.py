"""Adds up JUnit reports: lists what failed and what was skipped with its reason, then one line of totals.

    summarize.py REPORT.xml...

Exits 1 if anything failed, or if a report is missing or holds no test: a step that did not run is no success.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def reason(case: ElementTree.Element, skipped: ElementTree.Element) -> str:
    """Why a test was skipped: pytest's message, or what a GoogleTest printed before its SKIPPED mark."""
    output = case.findtext("system-out") or ""
    found = re.search(r"Skipped\n(.+?)\n\s*(?:\n|\[ +SKIPPED)", output, re.DOTALL) or re.search(
        r"skipped: (.+)", output
    )
    if found:
        return " ".join(found.group(1).split())
    return skipped.get("message") or "no reason given"


def main(reports: list[str]) -> int:
    passed = failed = 0
    skips: dict[str, list[str]] = {}
    for report in map(Path, reports):
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            print(f"FAILED   {report.stem}: no report ({error})")
            failed += 1
            continue
        if not cases:
            print(f"FAILED   {report.stem}: no test ran")
            failed += 1
        for case in cases:
            skipped = case.find("skipped")
            if (
                case.find("failure") is not None
                or case.find("error") is not None
                or case.get("status") == "fail"
            ):
                print(f"FAILED   {report.stem}: {case.get('classname')} {case.get('name')}")
                failed += 1
            elif skipped is not None or case.get("status") in ("notrun", "disabled"):
                why = reason(case, skipped) if skipped is not None else "not run"
                name = (case.get("name") or "").split("  # GetParam")[0]
                skips.setdefault(why, []).append(f"{report.stem}: {name}")
            else:
                passed += 1
    for why, names in skips.items():
        print(f"skipped: {why}")
        for name in names:
            print(f"    {name}")
    print(f"{passed} passed, {failed} failed, {sum(map(len, skips.values()))} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
