"""Write the exact versions of uv.lock into pyproject.toml's constraint-dependencies.

uv.lock itself stays out of git. To move to newer versions: empty the list, run `uv lock --upgrade`, then this, then the
tests.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Rewrite the list between the brackets, sorted by name."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    pins = sorted(f"{package['name']}=={package['version']}" for package in lock["package"] if "version" in package)
    pins = [pin for pin in pins if not pin.startswith("tilewright==")]
    listed = "".join(f'  "{pin}",\n' for pin in pins)
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    text, count = re.subn(r"(?s)(constraint-dependencies = \[\n).*?(\n?\]\n)", rf"\g<1>{listed}]\n", text)
    if count != 1:
        raise SystemExit("pyproject.toml has no constraint-dependencies list to fill")
    path.write_text(text)
    print(f"{len(pins)} versions pinned")


if __name__ == "__main__":
    main()
