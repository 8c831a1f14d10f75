"""Flags of Miles and slime that Furlong does not have, and what stands in their place: sentences for error messages.

A flag that both have keeps Miles' name (sections.py) and is not listed here.
"""

_MEGATRON = "It belongs to Megatron; trainer ranks share the model by FSDP here. Leave it out."
_OWN_LOOP = "Rollout, sampling and training loop are not replaceable by a flag here."
_ALWAYS_PACKED = "Micro-batches are always packed by length, up to --max-tokens-per-gpu."
_HERE = "Every checkpoint is in --run-dir, under checkpoints/, and holds a transformers folder hf/."

INSTEAD: dict[str, str] = {
    "save": _HERE,
    "save-hf": _HERE,
    "load": "A run goes on from the newest checkpoint of its --run-dir by itself; --hf-checkpoint is where it begins.",
    "num-epoch": "Give --num-rollout.",
    "colocate": "Trainer and engines are processes of their own; leave it out.",
    "num-gpus-per-node": "Give --trainer-num-ranks and --rollout-num-engines.",
    "rollout-function-path": _OWN_LOOP,
    "custom-generate-function-path": _OWN_LOOP,
    "dynamic-sampling-filter-path": _OWN_LOOP,
    "over-sampling-batch-size": _OWN_LOOP,
    "partial-rollout": _OWN_LOOP,
    "rollout-max-context-len": "Give --rollout-max-prompt-len and --rollout-max-response-len.",
    "rm-url": "Call the service in a reward function of your own: --custom-rm-path.",
    "kl-coef": "The KL is a part of the loss here: --use-kl-loss --kl-loss-coef.",
    "optimizer": "The optimiser is AdamW; leave it out.",
    "use-dynamic-batch-size": _ALWAYS_PACKED,
    "micro-batch-size": _ALWAYS_PACKED,
    "balance-data": "Leave it out.",
    "tensor-model-parallel-size": _MEGATRON,
    "pipeline-model-parallel-size": _MEGATRON,
    "context-parallel-size": _MEGATRON,
    "expert-model-parallel-size": _MEGATRON,
    "expert-tensor-parallel-size": _MEGATRON,
    "sequence-parallel": _MEGATRON,
    "recompute-granularity": _MEGATRON,
    "use-wandb-offline": "Give --wandb-mode offline.",
}


def instead_of(flag: str) -> str:
    """What to do instead of a flag of Miles, as a sentence; empty when there is nothing to say. Without its dashes."""
    name = flag.replace("_", "-")
    if name.startswith("sglang-router-"):
        return "Furlong has a router of its own; one that runs elsewhere is named by --router-addr."
    if name.startswith("sglang-"):
        return "Flags of SGLang go into the list sglang_args of the file's section [rollout], as SGLang spells them."
    return INSTEAD.get(name, "")
