"""The reference: what verification and the window logic mean, in float64 NumPy, slot by slot where that is clearer.

Every other backend is compared with this file. It is written to be read, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csd_ops.contract import FREE, NOTHING, Coupling, Form, Fresh, Kind, Settings

Array = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Verified:
    """What verification says of every decision slot, as if the window had not ended before it."""

    q: Array  # [B, W, V] the target law
    accept: NDArray[np.bool_]  # [B, W]
    replacement: Ids  # [B, W] the token to commit when the draft is rejected
    redraft: Ids  # [B, W] the next draft when an earlier slot ended the window
    measures: Array  # [B, W, 6] columns of contract.MEASURES


@dataclass(frozen=True)
class State:
    """The decoding state between two passes; shapes as in contract.STATE."""

    ids: Ids
    length: Ids
    position: Ids
    kind: Ids
    draft_probs: Array
    history_probs: Array
    history_ids: Ids


def target_law(logits: Array, guidance: Array, settings: Settings) -> Array:
    """Guidance, temperature, top-k, top-p and softmax, in this order: [R, W, V] -> q [B, W, V].

    Guidance is z = w z_cond + (1 - w) z_uncond. Top-k keeps ties with the k-th logit. Top-p keeps the smallest set of
    most likely tokens whose mass reaches top_p, and ties with its last.
    """
    rows = logits.reshape(len(guidance), -1, *logits.shape[1:])  # [G, B, W, V]
    z = np.tensordot(guidance, rows, axes=1) / settings.temperature
    if settings.top_k > 0:
        k = min(int(settings.top_k), z.shape[-1])
        z = np.where(z < np.sort(z, axis=-1)[..., -k, None], -np.inf, z)
    q = _softmax(z)
    if settings.top_p < 1:
        ranked = -np.sort(-q, axis=-1)
        before = np.cumsum(ranked, axis=-1) - ranked  # mass of all more likely tokens
        least = np.where(before < settings.top_p, ranked, np.inf).min(axis=-1, keepdims=True)
        q = _softmax(np.where(q < least, -np.inf, z))
    return q


def _softmax(z: Array) -> Array:
    mass = np.exp(z - z.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def entropy(q: Array) -> Array:
    """H(q) = -sum q ln q in nats, 0 ln 0 = 0."""
    return -np.sum(q * np.log(np.where(q > 0, q, 1.0)), axis=-1)


def total_variation(p: Array, q: Array) -> Array:
    """TV(p, q) = 1/2 sum |p - q|."""
    return 0.5 * np.abs(p - q).sum(axis=-1)


def residual(q: Array, p: Array, b: Array) -> Array:
    """relu(q - b p), not normalised; q where nothing is left (only by rounding).

    For b >= min(1, q/p) it equals relu(q - p), which Theorem 3.1 of arXiv 2606.27829 shows to be optimal; for
    b < min(1, q/p) it makes the output law exactly q.
    """
    left = np.maximum(q - b * p, 0.0)
    return np.where(left.sum(axis=-1, keepdims=True) > 0, left, q)


def acceptance(p: Array, q: Array, slot: Array, relax: NDArray[np.bool_], settings: Settings, codes: Array) -> Array:
    """b(x) for every token x of every slot: [B, W, V]. 0 where p(x) = 0: such a token is never drafted.

    `slot` [W] is the draft index i, `relax` [B, W] says where the bonus may apply, `codes` [V, E] are the vectors of
    the GSD filter. Affine form: equation 6 of arXiv 2606.27829, generalised as in csd_ops.rules.
    """
    ratio = np.divide(q, p, out=np.zeros_like(q), where=p > 0)
    if settings.form == Form.GROUP:
        ratio = _group_ratio(p, q, settings, codes)
    scale = settings.scale * np.exp(-settings.decay * slot)  # [W]
    near = (total_variation(p, q) < settings.delta) & relax
    bonus = settings.epsilon * relax + settings.lambda_ * entropy(q) * near  # [B, W]
    b = np.clip(scale[:, None] * ratio + bonus[..., None], 0.0, 1.0)
    return np.where(p > 0, b, 0.0)


def _group_ratio(p: Array, q: Array, settings: Settings, codes: Array) -> Array:
    """q(C(x)) / p(C(x)) for every x: Algorithm 3 of arXiv 2508.07747."""
    vocabulary = q.shape[-1]
    reach = (int(settings.group_size) - 1) // 2
    order = np.argsort(-q, axis=-1, kind="stable")
    ratio = np.zeros_like(q)
    for index in np.ndindex(*q.shape[:-1]):
        ranked, law, draft = order[index], q[index], p[index]
        for rank, x in enumerate(ranked):
            near = ranked[max(0, rank - reach) : min(vocabulary, rank + reach + 1)]
            close = np.abs(law[near] - law[x]) < settings.group_probability
            close &= np.square(codes[near] - codes[x]).sum(axis=-1) < settings.group_distance
            group = near[close | (near == x)]
            mass = draft[group].sum()
            ratio[(*index, x)] = law[group].sum() / mass if mass > 0 else 0.0
    return ratio


def sample(mass: Array, uniform: Array) -> Ids:
    """The token at which the running sum of `mass` [..., V] first exceeds uniform * total."""
    running = np.cumsum(mass, axis=-1)
    chosen = (running <= uniform[..., None] * running[..., -1:]).sum(axis=-1)
    return np.minimum(chosen, mass.shape[-1] - 1)


def verify(
    logits: Array,  # [R, W, V]
    drafts: Ids,  # [B, W]
    kind: Ids,  # [B, W]
    p: Array,  # [B, W, V]
    uniforms: Array,  # [B, W, 3]
    gumbel: Array,  # [B, W, V or 1]
    guidance: Array,  # [G]
    settings: Settings,
    codes: Array,  # [V, E]
) -> Verified:
    """Judge every draft of the window and draw what may replace it.

    Drafts after the first rejection are redrawn by the coupling, whose own acceptance is always min(1, q/p), so that
    each is again a sample of q given its context (p := q afterwards). The relaxed b serves the verified prefix only.
    """
    target = target_law(logits, guidance, settings)
    q = np.maximum(target, settings.floor)
    p = np.where(kind[..., None] >= Kind.FRESH, np.maximum(p, settings.floor), 0.0)
    real = kind >= Kind.FRESH
    relax = (kind == Kind.DRAFTED) | ((kind == Kind.FRESH) & (settings.relax_fresh > 0))
    b = acceptance(p, q, np.arange(q.shape[1], dtype=float), relax, settings, codes)
    exact = np.where(p > 0, np.minimum(1.0, np.divide(q, p, out=np.zeros_like(q), where=p > 0)), 0.0)

    def at(law: Array, token: Ids) -> Array:
        return np.take_along_axis(law, token[..., None], axis=-1)[..., 0]

    x = np.where(real, drafts, 0)
    lossy = residual(q, p, exact if settings.form == Form.GROUP else b)
    replacement = sample(lossy, uniforms[..., 1])
    if settings.coupling == Coupling.GUMBEL:
        redraft = np.argmax(np.log(np.where(target > 0, target, 1e-300)) + gumbel, axis=-1)
    elif settings.coupling == Coupling.MAXIMAL:
        kept = real & (uniforms[..., 0] < at(exact, x))
        redraft = np.where(kept, x, sample(residual(q, p, exact), uniforms[..., 1]))
    else:
        redraft = sample(target, uniforms[..., 1])
    accept = uniforms[..., 0] < at(b, x)
    chance = at(b, x)
    if settings.form == Form.JACOBI:
        replacement, accept, chance = redraft, redraft == x, at(q, x)
        distortion = np.zeros(x.shape)
    else:
        rejected = np.sum((1.0 - b) * p, axis=-1, keepdims=True)
        output = b * p + rejected * lossy / lossy.sum(axis=-1, keepdims=True)
        distortion = total_variation(output, q)
    accept = (real & accept) | (kind == Kind.FORCED)

    def surprise(token: Ids) -> Array:
        return -np.log(np.maximum(at(target, token), 1e-30))

    measures = np.stack(
        [
            entropy(q),
            total_variation(p, q) * real,
            chance * real,
            distortion * real,
            surprise(x),
            surprise(replacement),
        ],
        axis=-1,
    )
    return Verified(target, accept, replacement, redraft, measures)


def advance(
    state: State,
    verified: Verified,
    uniforms: Array,  # [B, W, 3]
    grammar: Ids,  # [T]
    settings: Settings,
) -> tuple[State, Ids, Ids]:
    """First rejection, commit, shift and refill: the next state, `committed` [B] and `tokens` [B, W].

    Image by image and slot by slot: this is the definition, not the implementation.
    """
    images, window, vocabulary = verified.q.shape
    columns = state.history_ids.shape[1]
    tokens = np.zeros((images, window), dtype=np.int64)
    committed = np.zeros(images, dtype=np.int64)
    ids, kind = np.zeros((images, window), dtype=np.int64), np.zeros((images, window), dtype=np.int64)
    draft_probs = np.zeros((images, window, vocabulary))
    history_probs, history_ids = state.history_probs.copy(), state.history_ids.copy()
    for image in range(images):
        start = int(state.position[image])
        drafts = np.append(state.ids[image, 1:], 0)
        leading = 0
        while leading < window - 1 and verified.accept[image, leading]:
            leading += 1
        for slot in range(window):
            forced = grammar[start + slot]
            if forced >= 0:
                tokens[image, slot] = forced
            elif slot < leading:
                tokens[image, slot] = drafts[slot]
            elif slot == leading:
                tokens[image, slot] = verified.replacement[image, slot]
            else:
                tokens[image, slot] = verified.redraft[image, slot]
        count = sum(grammar[start + slot] != NOTHING for slot in range(leading + 1))
        committed[image] = count
        position = start + count
        laws = np.concatenate([state.history_probs[image], verified.q[image]])  # row r: position start - C + r
        names = np.concatenate([state.history_ids[image], tokens[image]])
        history_probs[image], history_ids[image] = (
            laws[count : count + columns],
            names[count : count + columns],
        )
        ids[image, 0] = tokens[image, count - 1] if count else state.ids[image, 0]
        for slot in range(window):
            rule = grammar[min(position + slot, len(grammar) - 1)]
            old = count + slot  # this position's slot in the pass just made
            law = np.zeros(vocabulary)
            draft = 0
            if rule >= 0:
                what, draft = Kind.FORCED, int(rule)
            elif rule == NOTHING or slot == window - 1:
                what = Kind.ABSENT
            elif old < window:
                what, draft, law = Kind.DRAFTED, int(tokens[image, old]), verified.q[image, old]
            else:
                what = Kind.FRESH
                draft, law = _fresh(old, position + slot, laws, names, columns, uniforms[image, slot, 2], settings)
            kind[image, slot], draft_probs[image, slot] = what, law
            if slot + 1 < window:
                ids[image, slot + 1] = draft
    rows = len(state.ids) // images
    advanced = State(
        ids=np.tile(ids, (rows, 1)),
        length=state.length + np.tile(committed, rows),
        position=state.position + committed,
        kind=kind,
        draft_probs=draft_probs,
        history_probs=history_probs,
        history_ids=history_ids,
    )
    return advanced, committed, tokens


def _fresh(
    old: int, position: int, laws: Array, names: Ids, columns: int, uniform: float, settings: Settings
) -> tuple[int, Array]:
    """A draft and its law for a position that no pass has reached; `laws` and `names` end at the last slot."""
    vocabulary = laws.shape[-1]
    last = len(laws) - 1
    above = min(old, last)  # the row of position - C
    has_above = position >= columns
    anywhere = min(int(uniform * vocabulary), vocabulary - 1)
    scheme = Fresh(int(settings.fresh))
    if scheme == Fresh.LAW_LEFT or (scheme == Fresh.LAW_ABOVE and has_above):
        law = laws[last if scheme == Fresh.LAW_LEFT else above]
        return int(sample(law[None], np.array([uniform]))[0]), law
    if scheme == Fresh.COPY_LEFT or (scheme == Fresh.COPY_ABOVE and has_above):
        copied = int(names[last if scheme == Fresh.COPY_LEFT else above])
        anywhere = copied if copied < vocabulary else anywhere
    if scheme in (Fresh.UNIFORM, Fresh.LAW_ABOVE):
        return anywhere, np.full(vocabulary, 1.0 / vocabulary)
    return anywhere, np.eye(vocabulary)[anywhere]


def first_state(
    prompt_last: Ids,  # [R] the last prompt id of each row
    length: Ids,  # [R] prompt ids already in the cache
    window: int,
    columns: int,
    vocabulary: int,
    grammar: Ids,
    uniforms: Array,  # [B, W]
    settings: Settings,
) -> State:
    """The state before the first window: nothing decided, every free slot FRESH, no law computed yet."""
    images = len(uniforms)
    kind = np.full((images, window), Kind.FRESH, dtype=np.int64)
    ids = np.zeros((images, window + 1), dtype=np.int64)
    draft_probs = np.zeros((images, window, vocabulary))
    for image, slot in np.ndindex(images, window):
        rule = grammar[slot]
        draft = min(int(uniforms[image, slot] * vocabulary), vocabulary - 1)
        if rule >= 0:
            kind[image, slot], draft = Kind.FORCED, int(rule)
        elif rule == NOTHING or slot == window - 1:
            kind[image, slot] = Kind.ABSENT
        elif settings.fresh in (Fresh.UNIFORM, Fresh.LAW_LEFT, Fresh.LAW_ABOVE):
            draft_probs[image, slot] = 1.0 / vocabulary
        else:
            draft_probs[image, slot, draft] = 1.0
        assert rule == FREE or kind[image, slot] != Kind.FRESH
        ids[image, slot + 1] = draft
    rows = len(prompt_last) // images
    fed = np.tile(ids[:, :window], (rows, 1))
    fed[:, 0] = prompt_last
    return State(
        ids=fed,
        length=np.asarray(length, dtype=np.int64),
        position=np.zeros(images, dtype=np.int64),
        kind=kind,
        draft_probs=draft_probs,
        history_probs=np.full((images, columns, vocabulary), 1.0 / vocabulary),
        history_ids=np.zeros((images, columns), dtype=np.int64),
    )
