"""Every loss once more, in numpy, token by token, each with its gradient written out by hand.

Nothing here uses torch or the package: a function gets the arrays of a case and the parameters as plain numbers and
returns (value, gradient with respect to log π ``[T]``), both with the case's token weights.
"""

from __future__ import annotations

import math

import numpy as np

INF = math.inf


def log_ratio(a, b):
    """a − b, and 0 where both are −∞."""
    return 0.0 if a == b == -INF else a - b


def cut_ratio(a, b):
    """(exp of ℓ cut to ±20, whether the gradient stops: at the cut, and for a token impossible on both sides)."""
    logs = log_ratio(a, b)
    return math.exp(min(20.0, max(-20.0, logs))), not -20.0 <= logs <= 20.0 or a == -INF


def finite(logs):
    return min(1e6, max(-1e6, logs))


def tokens(case, per_token):
    """Sum over the trained tokens of ``per_token(t) → (loss, dloss/dlog π_t)``."""
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        for t in row:
            loss, slope = per_token(t)
            value += case.weights[t] * loss
            gradient[t] = case.weights[t] * slope
    return value, gradient


def surrogate(r, saturated, a, low, high, dual=INF, delta=INF):
    """PPO's loss of one token and its derivative by log π, case by case instead of by min and clamp."""
    if a > 0:
        if r > 1 + high:
            return -(1 + high) * a, 0.0
        return -r * a, 0.0 if saturated else -r * a
    if a < 0:
        if r < 1 - low:
            return -(1 - low) * a, 0.0
        worst = min(delta, dual)
        if r > worst:
            return -worst * a, 0.0
        return -r * a, 0.0 if saturated else -r * a
    return 0.0, 0.0


def weighted(c, a, logp):
    """−c·A·log π with a constant c; an impossible token contributes nothing."""
    return (0.0, 0.0) if logp == -INF else (-c * a * logp, -c * a)


def reinforce(case, **_):
    return tokens(case, lambda t: weighted(1.0, case.advantages[t], case.current[t]))


def tis(case, cap):
    def one(t):
        rho, _ = cut_ratio(case.current[t], case.behaviour[t])
        return weighted(min(rho, cap), case.advantages[t], case.current[t])

    return tokens(case, one)


def cispo(case, floor, cap):
    def one(t):
        r, _ = cut_ratio(case.current[t], case.proximal[t])
        return weighted(min(max(r, floor), cap), case.advantages[t], case.current[t])

    return tokens(case, one)


def ppo(case, clip_low, clip_high, dual_clip, delta):
    def one(t):
        r, saturated = cut_ratio(case.current[t], case.proximal[t])
        return surrogate(r, saturated, case.advantages[t], clip_low, clip_high, dual_clip, delta)

    return tokens(case, one)


def sapo(case, tau_pos, tau_neg):
    def one(t):
        a = case.advantages[t]
        r, saturated = cut_ratio(case.current[t], case.proximal[t])
        tau = tau_pos if a > 0 else tau_neg
        x = tau * (r - 1) / 2
        # (4/τ)σ(2x) = (2/τ)(1 + tanh x), and its derivative by log π is r·sech² x.
        sech = 0.0 if abs(x) > 300 else 1 / math.cosh(x)
        return -(2 / tau) * (1 + math.tanh(x)) * a, 0.0 if saturated else -a * r * sech**2

    return tokens(case, one)


def decoupled_ppo(case, clip_low, clip_high, dual_clip, weight_cap, weight_rule):
    def one(t):
        w, _ = cut_ratio(case.proximal[t], case.behaviour[t])
        if w > weight_cap:
            w = 0.0 if weight_rule == "mask" else weight_cap
        r, saturated = cut_ratio(case.current[t], case.proximal[t])
        loss, slope = surrogate(r, saturated, case.advantages[t], clip_low, clip_high, dual_clip)
        return w * loss, w * slope

    return tokens(case, one)


def dppo(case, clip_low, clip_high, divergence, pull, cap):
    def one(t):
        a, logs = case.advantages[t], log_ratio(case.current[t], case.behaviour[t])
        now, then = math.exp(case.current[t]), math.exp(case.behaviour[t])
        if divergence == "kl":
            kl = (1 - then) * math.log((1 - then + 1e-8) / (1 - now + 1e-8))
            if then > 0:
                kl += INF if now == 0 else then * math.log(then / now)
            fell, rose = now < then and kl > clip_low, now > then and kl > clip_high
        elif divergence == "absolute":
            fell = rose = abs(now - then) > clip_high
        else:
            fell, rose = now - then < -clip_low, now - then > clip_high
        keep = not (rose if a > 0 else fell)
        rho, saturated = cut_ratio(case.current[t], case.behaviour[t])
        if cap == INF:
            loss, slope = -rho * a, 0.0 if saturated else -rho * a
        else:
            loss, slope = weighted(min(rho, cap), a, case.current[t])
        back = 0.0 if math.isinf(logs) else logs
        return keep * loss + pull * back**2, keep * slope + 2 * pull * back

    return tokens(case, one)


def gspo(case, clip_low, clip_high):
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        if not len(row):
            continue
        mean = sum(finite(log_ratio(case.current[t], case.proximal[t])) for t in row) / len(row)
        s, open_ = math.exp(min(mean, 10.0)), mean <= 10.0
        reached = 0.0  # Σ over the row of weight × dloss_t/ds · s: ds/dlog π_u = s/n for every u of the row
        for t in row:
            loss, slope = surrogate(s, not open_, case.advantages[t], clip_low, clip_high)
            value += case.weights[t] * loss
            reached += case.weights[t] * slope
        for u in row:
            if math.isfinite(case.current[u]) and math.isfinite(case.proximal[u]):
                gradient[u] = reached / len(row)
    return value, gradient


def gspo_token(case, clip_low, clip_high):
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        if not len(row):
            continue
        mean = sum(finite(log_ratio(case.current[t], case.proximal[t])) for t in row) / len(row)
        for t in row:
            loss, slope = surrogate(math.exp(min(mean, 10.0)), mean > 10.0, case.advantages[t], clip_low, clip_high)
            value += case.weights[t] * loss
            gradient[t] = 0.0 if case.current[t] == -INF else case.weights[t] * slope
    return value, gradient


def gmpo(case, clip_low, clip_high):
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        if not len(row):
            continue
        xs, live = [], []
        for t in row:
            x, a = finite(log_ratio(case.current[t], case.proximal[t])), case.advantages[t]
            over = (a > 0 and x > clip_high) or (a < 0 and x < -clip_low)
            live.append(not over and math.isfinite(case.current[t]) and math.isfinite(case.proximal[t]))
            xs.append((clip_high if a > 0 else -clip_low) if over else x)
        mean = sum(xs) / len(xs)
        s = math.exp(min(mean, 10.0))
        reached = sum(-case.weights[t] * case.advantages[t] * s for t in row)
        value += reached
        for t, alive in zip(row, live, strict=True):
            gradient[t] = reached / len(row) if alive and mean <= 10.0 else 0.0
    return value, gradient


def topr(case, cap):
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        product = sum(finite(log_ratio(case.current[t], case.behaviour[t])) for t in row)
        for t in row:
            c = 1.0 if case.advantages[t] >= 0 else math.exp(min(product, math.log(cap)))
            loss, slope = weighted(c, case.advantages[t], case.current[t])
            value += case.weights[t] * loss
            gradient[t] = case.weights[t] * slope
    return value, gradient


def vespo(case, k_pos, lambda_pos, k_neg, lambda_neg):
    value, gradient = 0.0, np.zeros(len(case.current))
    for row in case.rows():
        logs = sum(max(-20.0, min(20.0, log_ratio(case.current[t], case.behaviour[t]))) for t in row)
        w = math.exp(min(20.0, max(math.log(1e-8), logs)))
        for t in row:
            k, lam = (k_pos, lambda_pos) if case.advantages[t] >= 0 else (k_neg, lambda_neg)
            phi = w**k * math.exp(lam * (1 - w))
            loss, slope = weighted(phi, case.advantages[t], case.current[t])
            value += case.weights[t] * loss
            gradient[t] = case.weights[t] * slope
    return value, gradient


def harmful(case):
    """(token, ℓ) of tokens that are trained, with ℓ against behaviour."""
    found = []
    for row in case.rows():
        for t in row:
            logs, a = finite(log_ratio(case.current[t], case.behaviour[t])), case.advantages[t]
            if (a > 0 and logs > 1e-12) or (a < 0 and logs < -1e-12):
                found.append((logs**2, t))
    return sorted(found)


def m2po(case, budget, clip_low, clip_high, moment_rule):
    squares = [square for square, _ in harmful(case)]
    allowed = budget * len(squares)
    if moment_rule == "mask":
        dropped = set()
        left = harmful(case)
        while left and sum(square for square, _ in left) >= budget * len(left):
            dropped.add(left.pop()[1])
        if sum(squares) <= allowed:
            dropped = set()

        def one(t):
            rho, saturated = cut_ratio(case.current[t], case.behaviour[t])
            slope = 0.0 if saturated else -rho * case.advantages[t]
            return (0.0, 0.0) if t in dropped else (-rho * case.advantages[t], slope)

        return tokens(case, one)
    bound = INF
    if squares and sum(squares) > allowed:
        fits = [v for v in squares if sum(min(v, other) for other in squares) < allowed]
        bound = math.sqrt(max(max(fits) - 1e-12, 0.0)) if fits else 0.0
    low, high = max(1 - math.exp(-bound), clip_low), max(math.expm1(bound) if bound < 700 else INF, clip_high)

    def one(t):
        rho, saturated = cut_ratio(case.current[t], case.behaviour[t])
        return surrogate(rho, saturated, case.advantages[t], low, high)

    return tokens(case, one)


def covariances(case):
    trained = np.concatenate(case.rows()).astype(int)
    logp = {t: max(case.current[t], -1e6) for t in trained}
    mean_a = sum(case.advantages[t] for t in trained) / len(trained)
    mean_p = sum(logp.values()) / len(trained)
    return {t: (case.advantages[t] - mean_a) * (logp[t] - mean_p) for t in trained}


def kl_cov(case, cov_share, pull):
    cov = covariances(case)
    held = sorted(cov, key=cov.get, reverse=True)[: max(1, int(cov_share * len(cov)))]

    def one(t):
        logs = log_ratio(case.current[t], case.proximal[t])
        r, saturated = cut_ratio(case.current[t], case.proximal[t])
        loss, slope = -r * case.advantages[t], 0.0 if saturated else -r * case.advantages[t]
        if t in held and math.isfinite(logs):
            loss, slope = loss + pull * abs(logs), slope + pull * np.sign(logs)
        return loss, slope

    return tokens(case, one)


LOSSES = {
    "reinforce": reinforce,
    "rloo": reinforce,
    "gpg": reinforce,
    "tis": tis,
    "ppo": ppo,
    "grpo": ppo,
    "dr_grpo": ppo,
    "dapo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "m2po": m2po,
    "topr": topr,
    "vespo": vespo,
    "kl_cov": kl_cov,
}
"""Clip-Cov draws its tokens: its test checks the draw."""
