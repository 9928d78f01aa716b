"""Writes reference.npz: what verl, trl and torchrl compute on the inputs stored beside it.

    python -m venv ref && ref/bin/pip install verl==0.9.1 trl==1.16.0 torchrl==0.14.1
    ref/bin/python tests/workers/reference/make.py

The default suite reads the file and needs none of the three. Names are `case/input` and
`case/output`; `versions` says what wrote them. Everything is float64 except where a case is about
another dtype.
"""

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torchrl.objectives.value.functional import generalized_advantage_estimate
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import selective_log_softmax
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

ROWS, LENGTH, GROUP = 8, 9, 4
GAMMA, LAM = 0.9, 0.8
OUT: dict[str, np.ndarray] = {}


def keep(**tensors: object) -> None:
    for name, value in tensors.items():
        array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        OUT[name.replace("__", "/")] = array


def actor(low: float, high: float, dual: float = 1e9) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )


def inputs() -> SimpleNamespace:
    g = torch.Generator().manual_seed(20)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([9, 1, 4, 7, 2, 9, 5, 8])
    mask = (torch.arange(LENGTH) < lengths[:, None]).double()
    old = -normal(ROWS, LENGTH).abs()
    made = SimpleNamespace(
        mask=mask,
        old=old,
        logprobs=old + 0.4 * normal(ROWS, LENGTH),
        reference=old + 0.6 * normal(ROWS, LENGTH),
        advantages=normal(ROWS),
        rewards=normal(ROWS),
        token_rewards=normal(ROWS, LENGTH) * mask,
        values=normal(ROWS, LENGTH),
        targets=normal(ROWS, LENGTH),
        logits=3 * normal(ROWS, LENGTH, 11),
        tokens=torch.randint(0, 11, (ROWS, LENGTH), generator=g),
    )
    made.holes = mask.clone()
    made.holes[0, 3:5] = made.holes[5, 1] = made.holes[7, 6] = 0
    keep(**{f"in__{name}": value for name, value in vars(made).items()})
    return made


def advantages(x: SimpleNamespace) -> None:
    index = np.repeat(np.arange(ROWS // GROUP), GROUP)
    one = torch.ones(ROWS, 1, dtype=torch.float64)

    def outcome(function: object, **more: object) -> torch.Tensor:
        return function(x.rewards[:, None].clone(), one, index, **more)[0][:, 0]

    grpo = verl.compute_grpo_outcome_advantage
    keep(
        verl__grpo=outcome(grpo, epsilon=1e-4),
        verl__dr_grpo=outcome(grpo, norm_adv_by_std_in_grpo=False),
        verl__rloo=outcome(verl.compute_rloo_outcome_advantage),
    )
    discount = SimpleNamespace(gamma=GAMMA)
    whitened, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        x.token_rewards * x.holes, x.holes, discount
    )
    keep(verl__reinforce_plus_plus=whitened, verl__returns=returns)
    whitened, targets = verl.compute_gae_advantage_return(
        x.token_rewards * x.holes, x.values, x.holes, GAMMA, LAM
    )
    keep(verl__gae_whitened=whitened, verl__gae_targets=targets)


def streams(x: SimpleNamespace) -> None:
    """An environment stream, time first here and last-but-one in torchrl: [envs, T, 1]."""
    g = torch.Generator().manual_seed(21)
    steps, envs = 12, 5
    rewards, values, following = torch.randn(3, steps, envs, generator=g, dtype=torch.float64)
    ends = torch.rand(2, steps, envs, generator=g) < 0.2
    terminated, truncated = ends[0], ends[1] & ~ends[0]
    advantage, target = generalized_advantage_estimate(
        GAMMA,
        LAM,
        *(v.T[..., None] for v in (values, following, rewards, terminated | truncated, terminated)),
    )
    keep(
        in__stream=torch.stack([rewards, values, following]),
        in__stream_ends=torch.stack([terminated, truncated]),
        torchrl__gae=advantage[..., 0].T,
        torchrl__gae_targets=target[..., 0].T,
    )


def with_gradient(x: SimpleNamespace, function: object) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.logprobs.clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def verl_losses(x: SimpleNamespace) -> None:
    wide = x.advantages[:, None].expand(ROWS, LENGTH)
    modes = {
        "token": "token-mean",
        "sequence": "seq-mean-token-mean",
        "constant": "seq-mean-token-sum-norm",
    }
    cases = {
        "ppo": (verl.compute_policy_loss_vanilla, actor(0.2, 0.2), None),
        "clip_higher": (verl.compute_policy_loss_vanilla, actor(0.2, 0.28), None),
        "dual": (verl.compute_policy_loss_vanilla, actor(0.2, 0.2, 1.5), None),
        "gspo": (verl.compute_policy_loss_gspo, actor(0.05, 0.08), None),
        "cispo": (verl.compute_policy_loss_cispo, actor(1.0, 0.28), None),
        "corrected": (verl.compute_policy_loss_vanilla, actor(0.2, 0.2), "weights"),
    }
    weights, _ = compute_rollout_correction_weights(
        x.old - x.reference, x.holes, rollout_is="token", rollout_is_threshold=1.2
    )
    keep(verl__importance_weights=weights)
    for name, (function, config, corrected) in cases.items():
        for kind, mode in modes.items():
            config.global_batch_info["loss_scale_factor"] = 16
            loss, gradient = with_gradient(
                x,
                lambda leaf, f=function, m=mode, c=config, w=corrected: f(
                    x.old, leaf, wide, x.holes, m, c, weights if w else None
                )[0],
            )
            keep(**{f"verl__{name}_{kind}": loss, f"verl__{name}_{kind}_grad": gradient})
    for clip in (0.3, 1e9):
        leaf = x.values.clone().requires_grad_()
        old = x.values + 0.5 * x.old
        loss, _ = verl.compute_value_loss(leaf, x.targets, old, x.holes, clip)
        (gradient,) = torch.autograd.grad(loss, leaf)
        keep(**{f"verl__value_{clip:g}": loss, f"verl__value_{clip:g}_grad": gradient})


def divergences(x: SimpleNamespace) -> None:
    for kind in ("k1", "k2", "k3", "k1+", "k3+"):
        value, gradient = with_gradient(
            x, lambda leaf, k=kind: verl.kl_penalty(leaf, x.reference, k).sum()
        )
        each = verl.kl_penalty(x.logprobs, x.reference, kind)
        keep(**{f"verl__{kind}": each, f"verl__{kind}_grad": gradient, f"verl__{kind}_sum": value})


def trl_losses(x: SimpleNamespace) -> None:
    """trl's own loss, with the log-probs given in place of a model."""
    cases = {
        "grpo": ("grpo", 0.2, 0.2, None, 0.0, "token"),
        "dapo": ("dapo", 0.2, 0.28, None, 0.0, "token"),
        "dr_grpo": ("dr_grpo", 0.2, 0.2, None, 0.0, "token"),
        "delta": ("dapo", 0.2, 0.2, 1.5, 0.0, "token"),
        "kl": ("dapo", 0.2, 0.2, None, 0.1, "token"),
        "gspo": ("grpo", 0.05, 0.08, None, 0.0, "sequence"),
        "cispo": ("cispo", 1.0, 1.28, None, 0.0, "token"),
    }
    for name, (kind, low, high, delta, beta, level) in cases.items():
        loss, gradient = with_gradient(
            x, lambda leaf, c=(kind, low, high, delta, beta, level): trl_loss(x, leaf, *c)
        )
        keep(**{f"trl__{name}": loss, f"trl__{name}_grad": gradient})


def trl_loss(x, leaf, kind, low, high, delta, beta, level, mask=None):
    mask = x.holes if mask is None else mask
    whole = lambda value, reduction="sum": value  # noqa: E731
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=kind,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=16,
        accelerator=SimpleNamespace(num_processes=1, gather=whole, reduce=whole),
        _entropy_bonus_enabled=False,
        _metrics={"train": __import__("collections").defaultdict(list)},
    )
    ids = torch.zeros(len(leaf), leaf.shape[1], dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": x.advantages,
        "old_per_token_logps": x.old,
        "ref_per_token_logps": x.reference,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(fake, None, batch)


def others(x: SimpleNamespace) -> None:
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [1, 79, 80, 81, 90, 99, 100, 101, 500]
    keep(
        in__overlong=lengths,
        trl__overlong=punish(completion_ids=[[1] * n for n in lengths]),
        trl__logprobs=selective_log_softmax(x.logits, x.tokens),
    )


def wrong(x: SimpleNamespace) -> None:
    """What they answer where they are wrong; the tests hold ours against what is right."""
    ten = torch.full((10, 1), 1.1)
    group = np.zeros(10, int)
    grpo = verl.compute_grpo_outcome_advantage
    keep(wrong__verl_equal_rewards=grpo(ten.clone(), torch.ones(10, 1), group)[0][:, 0])
    keep(wrong__verl_group_of_one=grpo(torch.ones(1, 1), torch.ones(1, 1), group[:1])[0][:, 0])

    row = lambda *v: torch.tensor([v], dtype=torch.float64)  # noqa: E731
    lost, _ = verl.compute_gae_advantage_return(
        torch.cat([row(0, 0, 1), row(0, 0, 1)]),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.cat([row(1, 1, 0), row(1, 1, 0)]),
        1.0,
        1.0,
    )
    _, targets = verl.compute_gae_advantage_return(
        row(0, 1, 0), row(0, 0, 100), row(1, 1, 0), 1.0, 0.95
    )
    keep(wrong__verl_lost_reward=lost, wrong__verl_masked_target=targets)

    far = torch.tensor([-29.0], dtype=torch.float64, requires_grad=True)
    value = verl.kl_penalty(far, torch.zeros(1, dtype=torch.float64), "k3")
    (gradient,) = torch.autograd.grad(value.sum(), far)
    keep(wrong__verl_k3=value, wrong__verl_k3_grad=gradient)

    loss = torch.ones(2, 3, dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.float64)
    padded = torch.cat([mask, torch.zeros(2, 5)], 1)
    mode = "seq-mean-token-sum-norm"
    keep(
        wrong__verl_constant=verl.agg_loss(loss, mask, mode),
        wrong__verl_constant_padded=verl.agg_loss(
            torch.cat([loss, torch.zeros(2, 5)], 1), padded, mode
        ),
    )

    empty = x.holes.clone()
    empty[1] = 0
    keep(in__empty_row=empty)
    keep(wrong__trl_empty_row=trl_loss(x, x.logprobs, "grpo", 0.2, 0.2, None, 0.0, "token", empty))
    leaf = torch.full((ROWS, LENGTH), -800.0, dtype=torch.float64, requires_grad=True)
    near = SimpleNamespace(**{**vars(x), "reference": 0 * x.reference, "old": leaf.detach()})
    loss = trl_loss(near, leaf, "dapo", 0.2, 0.2, None, 0.1, "token")
    keep(wrong__trl_k3=loss)
    huge = x.old.clone() + 800
    loss = trl_loss(x, huge, "dapo", 0.2, 0.2, None, 0.0, "token")
    keep(wrong__trl_ratio=loss)


def main() -> None:
    x = inputs()
    for part in (advantages, streams, verl_losses, divergences, trl_losses, others, wrong):
        part(x)
    names = ("verl", "trl", "torchrl", "torch")
    versions = {name: importlib.metadata.version(name) for name in names}
    np.savez_compressed(
        Path(__file__).with_name("reference.npz"), versions=json.dumps(versions), **OUT
    )
    print(f"{len(OUT)} arrays from {versions}")


if __name__ == "__main__":
    main()
