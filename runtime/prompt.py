"""Text to prompt ids, and the guidance pair that belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from csd_ops.errors import InputError
from runtime.bundle import TOKENIZER, Bundle


class PromptEncoder:
    """The bundle's tokenizer and prompt template."""

    def __init__(self, bundle: Bundle) -> None:
        from tokenizers import Tokenizer

        self._manifest = bundle.manifest
        path = bundle.path(TOKENIZER)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(f"expected a tokenizer in {path}, found: {error}; export the bundle again") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the conditional and the unconditional row, int64, in the bundle's one id space.

        The unconditional row keeps the first `kept_head` and last `kept_tail` ids and pads or drops what is between;
        or it is the negative prompt in the same template.
        """
        manifest = self._manifest
        text = " ".join(text.split())
        if not text:
            raise InputError("expected a prompt, found an empty one; say what to draw")
        for token in self._tokenizer.get_added_tokens_decoder().values():
            if token.special and token.content in text:
                raise InputError(
                    f"expected plain text in the prompt, found the special token {token.content!r}; drop it"
                )
        ids = self._template(text)
        if len(ids) > manifest.max_prompt:
            raise InputError(f"expected a prompt of at most {manifest.max_prompt} tokens, found {len(ids)}; shorten it")
        head, tail = ids[: manifest.kept_head], ids[len(ids) - manifest.kept_tail :]
        if manifest.unconditional == "negative":
            other = self._template(manifest.negative_prompt)
        elif manifest.unconditional == "drop":
            other = head + tail
        else:
            other = head + [manifest.pad_id] * (len(ids) - len(head) - len(tail)) + tail
        conditional, unconditional = (
            np.array([manifest.text_id(identifier) for identifier in row], np.int64) for row in (ids, other)
        )
        return conditional, unconditional

    def _template(self, text: str) -> list[int]:
        whole = self._manifest.prompt_prefix + text + self._manifest.prompt_suffix
        return list(self._tokenizer.encode(whole).ids)


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; empty lines and lines that start with # are left out."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise InputError(f"expected a text file of prompts at {path}, found: {reason}; name another") from None
    prompts = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not prompts:
        raise InputError(f"expected one prompt per line in {path}, found none; write some")
    return prompts
