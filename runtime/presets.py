"""Presets: a rule, a coupling, a law for fresh drafts and a window, under the name the field knows them by."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from csd_ops.contract import Coupling, Fresh, Settings
from csd_ops.errors import InputError
from csd_ops.rules import Addition, Amplify, Cool, Csd, Entropy, Gsd, Jacobi, Rule, Sjd


@dataclass(frozen=True)
class Preset:
    """How to draft and how to accept."""

    name: str
    rule: Rule
    window: int  # W: tokens fed per forward pass
    coupling: Coupling = Coupling.INDEPENDENT
    fresh: Fresh = Fresh.UNIFORM
    tuned: bool = False  # the window is the one that `csd tune` found fastest here
    paper_exact: bool = False  # relax drafts no pass has seen, clamp laws to 1e-10: as the CSD paper's code does

    @property
    def lossless(self) -> bool:
        """Whether the law of the pictures is exactly the model's."""
        return self.rule.lossless

    def settings(self, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Settings:
        """The numbers a pass runs with. A temperature of 0 means greedy."""
        if temperature == 0:
            temperature, top_k, top_p = 1.0, 1, 1.0
        _inside("temperature", temperature, 1e-3, 100.0)
        _inside("top-k", top_k, 0, 2**24)
        _inside("top-p", top_p, 1e-6, 1.0)
        return Settings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            coupling=self.coupling,
            fresh=self.fresh,
            relax_fresh=float(self.paper_exact),
            floor=1e-10 if self.paper_exact else 0.0,
            **self.rule.settings(),
        )


def _inside(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(f"expected {name} from {low:g} to {high:g}, found {value:g}; choose one inside")


# Settings as published per model family: (window, amplify k, addition epsilon, gsd size, csd delta)
_PUBLISHED = {
    "janus": {"k": 4.0, "epsilon": 0.4, "size": 25, "delta": 0.65},
    "lumina": {"k": 1.3, "epsilon": 0.1, "size": 3, "delta": 0.35},
}


def presets(family: str = "janus") -> dict[str, Preset]:
    """All presets for a model family, by name. Published settings where the papers give them."""
    published = _PUBLISHED.get(family, _PUBLISHED["janus"])
    delta = published["delta"]
    listed = [
        Preset("ar", Sjd(), 1),
        Preset("jacobi", Jacobi(), 16),
        Preset("sjd", Sjd(), 16),
        Preset("sjd-maximal", Sjd(), 32, Coupling.MAXIMAL),
        Preset("sjd-gumbel", Sjd(), 32, Coupling.GUMBEL),
        Preset("amplify", Amplify(published["k"]), 16),
        Preset("addition", Addition(published["epsilon"]), 16),
        Preset("entropy", Entropy(0.02), 16),
        Preset("cool", Cool(1.3, 0.7), 16),
        Preset("gsd", Gsd(int(published["size"]), 0.15), 16),
        Preset("csd-paper", Csd(0.5, delta), 16, paper_exact=True),
        Preset("csd", Csd(0.5, 0.65), 40, Coupling.MAXIMAL, Fresh.LAW_ABOVE),
    ]
    return {preset.name: preset for preset in listed}


def find_preset(name: str, family: str = "janus") -> Preset:
    """The preset of that name; InputError lists the known ones."""
    known = presets(family)
    if name not in known:
        raise InputError(f"expected a preset of {', '.join(known)}, found {name!r}; choose one of them")
    return known[name]


def adjust(preset: Preset, **changes: Any) -> Preset:
    """A preset with other numbers: window, coupling, fresh, paper_exact, or a parameter of its rule (None: keep)."""
    own = {field.name for field in fields(Preset)} - {"name", "rule", "tuned"}
    of_rule = {field.name: field for field in fields(preset.rule)}
    for name, value in changes.items():
        if value is None:
            continue
        key = "lambda_" if name == "lambda" else name
        if key in of_rule:
            current = getattr(preset.rule, key)
            preset = replace(preset, rule=replace(preset.rule, **{key: type(current)(value)}))
        elif key == "coupling":
            preset = replace(preset, coupling=_member(Coupling, value, name))
        elif key == "fresh":
            preset = replace(preset, fresh=_member(Fresh, value, name))
        elif key in own:
            preset = replace(preset, **{key: value})
        else:
            names = sorted(own | {entry.rstrip("_") for entry in of_rule})
            raise InputError(f"expected a setting of {preset.name} ({', '.join(names)}), found {name!r}; leave it out")
    return preset


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`name=value` pairs; a value that reads as a number is one."""
    parsed: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"expected name=value, found {text!r}; for example --set k=2")
        try:
            parsed[name.replace("-", "_")] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            parsed[name.replace("-", "_")] = {"true": True, "false": False}.get(value.lower(), value)
    return parsed


def _member(kind: type[Coupling] | type[Fresh], value: Any, name: str) -> Any:
    if isinstance(value, kind):
        return value
    names = {entry.name.lower().replace("_", "-"): entry for entry in kind}
    key = str(value).lower().replace("_", "-")
    if key not in names:
        raise InputError(f"expected {name} of {', '.join(names)}, found {value!r}; choose one of them")
    return names[key]
