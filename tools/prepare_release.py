"""Makes the tree ready to be built for a release: run by .github/workflows/release.yml.

python tools/prepare_release.py --url https://host/owner/repository --tag v0.1.0

Checks that the tag is that of `oxytorch.__version__`, adds the project's addresses to
pyproject.toml, and has links of the README lead to the repository, since its page at a package
index has no files beside it. Nothing of that is committed: the address is known where it is built.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_urls(project: str, url: str, tag: str) -> str:
    """The text of pyproject.toml, with the project's addresses."""
    if "[project.urls]" in project:
        raise ValueError("pyproject.toml: expected no [project.urls], found one")
    return (
        f'{project.rstrip()}\n\n[project.urls]\nSource = "{url}"\n'
        f'Documentation = "{url}/tree/{tag}/docs"\n'
        f'Changelog = "{url}/blob/{tag}/CHANGELOG.md"\nIssues = "{url}/issues"\n'
    )


def with_full_links(readme: str, url: str, tag: str) -> str:
    """The README, with links to files of the repository as links to it; pictures to their bytes."""
    kinds = {"!": "raw", "": "blob"}

    def full(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return found[0]
        return f"{mark}[{text}]({url}/{kinds[mark]}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", full, readme)


def version() -> str:
    """The one place of the version: `oxytorch.__version__`."""
    text = (ROOT / "src" / "oxytorch" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="the repository's address")
    parser.add_argument("--tag", required=True, help="empty for a run without a tag")
    arguments = parser.parse_args()
    tag = f"v{version()}"
    if arguments.tag not in ("", tag):
        parser.error(f"--tag: expected {tag}, the version of oxytorch, got {arguments.tag}")
    url = arguments.url.rstrip("/")
    for name, change in (("pyproject.toml", with_urls), ("README.md", with_full_links)):
        path = ROOT / name
        path.write_text(change(path.read_text(), url, tag))


if __name__ == "__main__":
    main()
