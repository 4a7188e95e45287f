"""Makes `goldens/templates.json`: what transformers renders from `templates.py`.

Not a test. A refusal is stored as null. Needs transformers, which the tests do not:

    python tests/text/make_template_goldens.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from templates import CASES, SPECIAL_TOKENS, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

FILE = Path(__file__).parent / "goldens" / "templates.json"


def rendered(source: str, case: dict[str, Any]) -> str | None:
    """One rendering by transformers."""
    try:
        texts, _ = render_jinja_template(
            conversations=[case["messages"]],
            chat_template=source,
            tools=case.get("tools"),
            add_generation_prompt=case.get("add_generation_prompt", True),
            **SPECIAL_TOKENS,
            **case.get("variables", {}),
        )
    except jinja2.TemplateError as error:
        print(f"refused: {error}")
        return None
    return str(texts[0])


def main() -> None:
    """Writes the file."""
    texts = {
        f"{name}/{case}": rendered(source, CASES[case])
        for name, source in TEMPLATES.items()
        for case in CASES
    }
    made_by = {name: version(name) for name in ("transformers", "jinja2")}
    content = json.dumps({"made_by": made_by, "texts": texts}, ensure_ascii=False, indent=1)
    FILE.write_text(content + "\n")


if __name__ == "__main__":
    main()
