"""The run's flags as a user's functions see them: one flat namespace, read-only, under Miles' names.

Furlong's own spelling of a flag stands beside Miles'. What Miles has and Furlong decides otherwise has the value that
says so (`colocate` is False); any other name is an error that says what is near.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from furlong.config import RunConfig
from furlong.config.miles import instead_of
from furlong.config.sections import Also


class Flags(Mapping[str, Any]):  # Any: every flag has its own type
    """The flags as attributes, and as a mapping."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """For `vars(args)`: a copy."""
        return dict(object.__getattribute__(self, "_values"))

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        near = difflib.get_close_matches(name, values, n=2, cutoff=0.7)
        hint = instead_of(name) or (f"Did you mean {' or '.join(near)}?" if near else "`furlong config` lists them.")
        raise AttributeError(f"args has no flag {name!r}. {hint}")

    def __setattr__(self, name: str, value: object) -> None:
        rule = "what a function of yours sets would change nothing in the run; keep it in a variable of your own"
        raise AttributeError(f"args.{name} cannot be set: flags are read-only, {rule}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args.{name} cannot be deleted: flags are read-only")

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self, "_values")[name]

    def __iter__(self) -> Iterator[str]:
        return iter(object.__getattribute__(self, "_values"))

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_values"))

    def __repr__(self) -> str:
        return f"Flags({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __copy__(self) -> "Flags":
        return self

    def __deepcopy__(self, memo: object) -> "Flags":
        return self

    def __reduce__(self) -> tuple[type["Flags"], tuple[dict[str, Any]]]:
        return Flags, (dict(self),)


def flags_of(config: RunConfig) -> Flags:
    """All flags of a run in one flat namespace."""
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for section_name in RunConfig.model_fields:
        section = getattr(config, section_name)
        for name, field in type(section).model_fields.items():
            own[name] = getattr(section, name)
            for also in (item for item in field.metadata if isinstance(item, Also)):
                others.update({other.replace("-", "_"): own[name] for other in also.names})
    return Flags({**_decided(config), **others, **own})


def _decided(config: RunConfig) -> dict[str, Any]:
    """What Miles' scripts ask of args and Furlong has under another name, or in one way only."""
    return {
        "colocate": False,
        "partial_rollout": False,
        "debug_rollout_only": False,
        "debug_train_only": False,
        "use_critic": False,
        "use_dynamic_batch_size": True,
        "wandb_always_use_train_step": False,
        "rewards_normalization": True,
        "grpo_std_normalization": not config.trainer.disable_grpo_std_normalization,
        "rollout_seed": config.run.seed,
        "eval_reward_key": config.rollout.reward_key,
        "num_gpus_per_node": config.trainer.trainer_num_ranks,
        "optimizer": "adam",
        "kl_coef": 0.0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "custom_generate_function_path": None,
        "load_debug_rollout_data": None,
    }
