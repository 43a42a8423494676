"""`python -m anybatch_guide.play task=digits micro_batch_size=16`: a run of the playground in a terminal."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from anybatch.errors import UserError
from anybatch_guide.playground import PlaygroundSetting, SettingError, parse_setting, run


def main(arguments: Sequence[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    """Run a setting and write the loss of each step; return the exit status."""
    try:
        setting = read(arguments)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    data = run(setting, lambda _: None)
    for loss in data["losses"]:
        write(f"{loss}\n")
    return 0


def read(arguments: Sequence[str]) -> PlaygroundSetting:
    """Return the default setting, changed by `name=value` arguments."""
    given = {**asdict(PlaygroundSetting())}
    for argument in arguments:
        name, sign, text = argument.partition("=")
        if not sign or name not in given:
            message = f"{argument!r} must be name=value, with one of {', '.join(given)}."
            raise SettingError(message, code="keys")
        # Texts are not parsed as JSON, which would need quotes.
        given[name] = text if isinstance(given[name], str) else _number(text)
    return parse_setting(given)


def _number(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
