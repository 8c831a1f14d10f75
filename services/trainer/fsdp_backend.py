"""The fsdp backend: a transformers LM, trained by plain PyTorch on one rank and by FSDP2 on several or in bf16.

Owns weights, optimiser and the order of a rollout's steps; the arithmetic stands in train_step, the layout in layout.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from furlong import records
from furlong.config import RunConfig
from services.trainer import layout
from services.trainer.backend import StepResult, TensorLayout, TrainerState, TrainResult
from services.trainer.batch import Batch
from services.trainer.checkpoint_tensors import read_state
from services.trainer.flops import peak_flops, sizes_of, training_flops
from services.trainer.layout import MicroBatch
from services.trainer.optimizer import AdamW, whole
from services.trainer.policy import Policy, attends_to_everything, load_lm
from services.trainer.profiler import TrainProfiler
from services.trainer.rank_info import RankInfo
from services.trainer.rollout_values import rollout_values
from services.trainer.schedule import learning_rate
from services.trainer.sharding import copy_into, like, local, shard
from services.trainer.shared_prompts import sharing_is_exact
from services.trainer.step_sums import StepOptions, StepSums, values_of
from services.trainer.train_step import (
    StepInputs,
    make_inputs,
    normalisers_of,
    run_micro_batches,
    split_by_gradient,
)

PREFIX = "lm."


class FsdpBackend:
    """See `backend.Backend`."""

    def __init__(self, config: RunConfig, ranks: RankInfo) -> None:
        """Load the models and shard them. Collective over the ranks. Raises ConfigError."""
        self._config = config
        self._ranks = ranks
        self._profiler = TrainProfiler(config, rank=ranks.rank)
        self._dtype = getattr(torch, config.model.dtype)
        self._policy = self._load(config.model.hf_checkpoint, key="model.hf_checkpoint")
        self._ref = self._load_reference() if config.trainer.use_kl_loss else None
        self._optimizer = AdamW(self._policy.named_parameters(), config.trainer)
        self._named = {name.removeprefix(PREFIX): parameter for name, parameter in self._optimizer.named}
        self._sizes = sizes_of(self._policy.lm.config, [(name, tuple(p.shape)) for name, p in self._named.items()])
        self.vocabulary_size = self._policy.vocabulary_size
        self.train_step = 0
        self.skipped_steps = 0
        on_gpu = ranks.device.type == "cuda"
        self.peak_flops = peak_flops(torch.cuda.get_device_name(ranks.device), self._dtype) if on_gpu else None
        self._share_prompts = attends_to_everything(self._policy.lm) and sharing_is_exact(self._policy)

    def _load(self, folder: str, *, key: str) -> Policy:
        lm = load_lm(folder, key=key)
        trainer, temperature = self._config.trainer, self._config.rollout.rollout_temperature
        policy = Policy(lm, temperature=temperature, entropy_gradient=trainer.entropy_coef != 0)
        policy.to(self._ranks.device)
        # one rank in float32 has nothing to gather and nothing to cast
        if self._ranks.world_size > 1 or self._dtype != torch.float32:
            shard(policy, device=self._ranks.device, world_size=self._ranks.world_size, dtype=self._dtype)
            policy.compute_dtype = self._dtype
        return policy

    def _load_reference(self) -> Policy:
        folder = self._config.trainer.ref_load or self._config.model.hf_checkpoint
        key = "trainer.ref_load" if self._config.trainer.ref_load else "model.hf_checkpoint"
        return self._load(folder, key=key).requires_grad_(False)

    def layouts(self) -> Sequence[TensorLayout]:
        return [TensorLayout(name, self._dtype, tuple(p.shape)) for name, p in self._named.items()]

    def train(self, batch: Batch) -> TrainResult:
        with self._profiler.training(batch.rollout_id):
            return self._train(batch)

    def close(self) -> None:
        """Write what the profiler still records."""
        self._profiler.close()

    def _train(self, batch: Batch) -> TrainResult:
        started = time.monotonic()
        start_log_probs, log_probs_time_s = self._timed_scores(self._policy, batch, wanted=batch.num_steps > 1)
        ref_log_probs, ref_time_s = self._timed_scores(self._ref, batch, wanted=self._ref is not None)
        inputs = make_inputs(
            batch,
            self._config.trainer,
            start_log_probs=start_log_probs,
            ref_log_probs=ref_log_probs,
            device=self._ranks.device,
        )
        seen = torch.zeros(len(batch.loss_mask), device=self._ranks.device)
        steps = [self._train_step(batch, step, inputs, seen) for step in range(batch.num_steps)]
        if start_log_probs is None:
            self._ranks.all_reduce(seen)
            start_log_probs = seen
        lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        return TrainResult(
            steps=steps,
            rollout_values=rollout_values(batch, log_probs=start_log_probs, ref_log_probs=ref_log_probs),
            train_time_s=time.monotonic() - started,
            log_probs_time_s=log_probs_time_s,
            ref_log_probs_time_s=ref_time_s,
            num_model_tokens=sum(lengths),
            model_flops=training_flops(self._sizes, lengths),
        )

    def _train_step(self, batch: Batch, step: int, inputs: StepInputs, seen: torch.Tensor) -> StepResult:
        trainer, run = self._config.trainer, self._config.run
        normalisers = normalisers_of(batch, step, per_token=trainer.calculate_per_token_loss)
        sums = StepSums()
        for members, differentiate in zip(split_by_gradient(batch, step, trainer), (True, False), strict=True):
            run_micro_batches(
                self._policy,
                self._plan(batch, members),
                inputs,
                trainer,
                normaliser=max(normalisers.weight, 1.0),
                differentiate=differentiate,
                sums=sums,
                keep_log_probs=_scatter_into(seen),
            )
        reduced = sums.reduce(self._ranks.all_reduce)
        values = values_of(reduced, normalisers, StepOptions(trainer.use_kl_loss, trainer.eps_clip_c is not None))
        rate = learning_rate(
            self.train_step,
            peak=trainer.lr,
            minimum=trainer.min_lr,
            warmup_steps=trainer.lr_warmup_iters,
            total_steps=run.num_rollout * batch.num_steps,
            style=trainer.lr_decay_style,
        )
        self.train_step += 1
        skipped = self._update(values, rate, reduced["loss"], trains=normalisers.num_tokens > 0)
        return StepResult(values, skipped, normalisers.num_tokens)

    def _update(self, values: dict[str, records.Value], rate: float, loss: float, *, trains: bool) -> bool:
        """Take the optimiser step and add what it was to the values. Without trained tokens there is none to take."""
        skipped = False
        if trains:
            outcome = self._optimizer.step(rate, loss_is_finite=loss - loss == 0)
            skipped = outcome.skipped
            self.skipped_steps += int(skipped)
            values["train/grad_norm"] = records.Last(outcome.grad_norm)
            values["train/grad_clipped"] = records.Last(int(outcome.clipped))
        else:
            values["train/grad_norm"] = records.Last(0.0)
            values["train/grad_clipped"] = records.Last(0)
        values["train/skipped_steps"] = records.Last(self.skipped_steps)
        for group in range(self._optimizer.num_groups):
            values[f"train/lr-pg_{group}"] = records.Last(rate)
        return skipped

    def _plan(self, batch: Batch, samples: Sequence[int]) -> list[MicroBatch]:
        planned = layout.plan(
            batch,
            samples,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            max_tokens=self._config.trainer.max_tokens_per_gpu,
            share_prompts=self._share_prompts,
        )
        return [layout.moved(micro_batch, self._ranks.device) for micro_batch in planned]

    def _timed_scores(
        self, policy: Policy | None, batch: Batch, *, wanted: bool
    ) -> tuple[torch.Tensor | None, float | None]:
        """(log-probs of all trained samples under a policy, [response token] on every rank, seconds), or Nones."""
        if not wanted or policy is None:
            return None, None
        started = time.monotonic()
        scores = torch.zeros(len(batch.loss_mask), device=self._ranks.device)
        scatter = _scatter_into(scores)
        members = [sample for sample, trained in enumerate(batch.trained_tokens) if trained > 0]
        with torch.no_grad():
            for micro_batch in self._plan(batch, members):
                log_probs, _ = policy(micro_batch)
                if not micro_batch.is_filler:
                    scatter(micro_batch, log_probs)
        self._ranks.all_reduce(scores)
        return scores, time.monotonic() - started

    def weights_are_finite(self) -> bool:
        parts = [local(parameter.detach()) for parameter in self._named.values()]
        bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
        total = torch.tensor(float(bad), dtype=torch.float64)
        self._ranks.all_reduce(total)
        return bool(total == 0)

    def gather(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return self._gathered([self._named[name].detach() for name in names], self._dtype)

    def _gathered(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        kept = []
        for tensor in tensors:
            full = whole(tensor)
            if self._ranks.rank == 0:
                kept.append(full.to("cpu", dtype).contiguous())
        return kept

    def state(self) -> TrainerState | None:
        names = list(self._named)
        weights = self._gathered([self._named[name].detach() for name in names], torch.float32)
        moments = [(f"{n}.{k}", m) for n in names for k, m in zip(*self._moments(n), strict=True)]
        gathered = self._gathered([moment for _, moment in moments], torch.float32)
        if self._ranks.rank != 0:
            return None
        return TrainerState(
            tensors=dict(zip(names, weights, strict=True)),
            moments=dict(zip([name for name, _ in moments], gathered, strict=True)),
            optimizer_steps=self._optimizer.num_steps(),
            rng=torch.get_rng_state(),
            train_step=self.train_step,
            skipped_steps=self.skipped_steps,
        )

    def _moments(self, name: str) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
        return ("exp_avg", "exp_avg_sq"), self._optimizer.moments(self._named[name])

    def restore(self, folder: str) -> None:
        state = read_state(Path(folder))
        for name, parameter in self._named.items():
            copy_into(parameter, state.tensors[name])
        moments: dict[str, Sequence[torch.Tensor]] = {
            f"{PREFIX}{name}": [like(parameter, state.moments[f"{name}.{kind}"]) for kind in self._moments(name)[0]]
            for name, parameter in self._named.items()
        }
        if state.optimizer_steps:
            self._optimizer.restore(moments, num_steps=state.optimizer_steps)
        torch.set_rng_state(state.rng)
        self.train_step, self.skipped_steps = state.train_step, state.skipped_steps


def _scatter_into(target: torch.Tensor) -> Callable[[MicroBatch, torch.Tensor], None]:
    """Writes a micro-batch's log-probs to their places among all response tokens."""

    def scatter(micro_batch: MicroBatch, log_probs: torch.Tensor) -> None:
        target[micro_batch.token_indices] = log_probs

    return scatter
