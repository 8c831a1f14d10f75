"""What must hold between the fields of a run, and what follows from what. Pure: reads no file, opens no socket.

`resolve` fills in values that follow from others; `check` names every broken rule at once.
"""

import math
import re

from furlong.config.destinations import check_destinations, is_loopback
from furlong.config.errors import ConfigError, Problem
from furlong.config.routerrules import check_router
from furlong.config.sections import RunConfig, RunSection

KNOBS = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
OF_THE_SERVICE = ("use_wandb", "use_tensorboard", "mlflow_tracking_uri", "statsd_addr", "otlp_endpoint")
OF_THE_SERVICE += ("metrics_webhook", "metrics_sink", "tail", "scrape")
OF_THE_SERVICE += ("disable_alerts", "alert_webhook", "alert_slack_webhook_file")
KNOB_RULE = "rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout"


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what follows from other fields. Raises ConfigError when it cannot follow."""
    run = config.run.model_copy(update=_solve_knobs(config))
    run = run.model_copy(update={"run_dir": run.run_dir or f"runs/{run.name}"})
    trainer = config.trainer
    if trainer.eps_clip_high is None:
        trainer = trainer.model_copy(update={"eps_clip_high": trainer.eps_clip})
    rollout = config.rollout.model_copy(update=_solve_engines(config))
    defaults = {
        "eval_temperature": rollout.rollout_temperature,
        "eval_top_p": rollout.rollout_top_p,
        "eval_max_response_len": rollout.rollout_max_response_len,
    }
    missing = {key: value for key, value in defaults.items() if getattr(rollout, key) is None}
    rollout = rollout.model_copy(update=missing)
    return config.model_copy(update={"run": run, "trainer": trainer, "rollout": rollout})


def _solve_knobs(config: RunConfig) -> dict[str, int]:
    """The one of the four knobs that was not given. global_batch_size and num_steps_per_rollout may both be left out:
    then a rollout is one step."""
    given = {name: getattr(config.run, name) for name in KNOBS if getattr(config.run, name) is not None}
    if set(given) == {"rollout_batch_size", "n_samples_per_prompt"}:
        given["num_steps_per_rollout"] = 1
    missing = [name for name in KNOBS if name not in given]
    if len(missing) > 1:
        remedy = (
            "Give the first two for one optimiser step a rollout, or three of them; "
            f"missing: {', '.join('--' + _kebab(name) for name in missing)}."
        )
        raise ConfigError([Problem("run", given, f"{KNOB_RULE} needs three of its four numbers", remedy)])
    left, right = KNOBS[:2], KNOBS[2:]
    if not missing:
        if math.prod(given[n] for n in left) != math.prod(given[n] for n in right):
            shown = " x ".join(str(given[n]) for n in left), " x ".join(str(given[n]) for n in right)
            products = math.prod(given[n] for n in left), math.prod(given[n] for n in right)
            rule = f"{KNOB_RULE} does not hold: {shown[0]} = {products[0]}, {shown[1]} = {products[1]}"
            remedy = "Leave one of the four out; it follows from the others. As a flag, None takes one out of the file."
            raise ConfigError([Problem("run", given, rule, remedy)])
        return given
    name = missing[0]
    partner = next(n for side in (left, right) if name in side for n in side if n != name)
    product = math.prod(given[n] for n in (right if name in left else left))
    if product % given[partner]:
        rule = f"{name} must be a whole number, but {product} is not divisible by {partner} = {given[partner]}"
        raise ConfigError([Problem(f"run.{name}", None, rule, f"Change one of {', '.join(given)}.")])
    return {**given, name: product // given[partner]}


def _solve_engines(config: RunConfig) -> dict[str, int]:
    """rollout_num_engines from Miles' rollout_num_gpus."""
    rollout = config.rollout
    if rollout.rollout_num_gpus is None:
        return {}
    per_engine = rollout.rollout_num_gpus_per_engine
    count, rest = divmod(rollout.rollout_num_gpus, per_engine)
    engines_given = "rollout_num_engines" in rollout.model_fields_set
    if rest or count == 0 or (engines_given and rollout.rollout_num_engines != count):
        rule = (
            f"must be rollout_num_engines x rollout_num_gpus_per_engine ({rollout.rollout_num_engines} x {per_engine})"
        )
        raise ConfigError(
            [Problem("rollout.rollout_num_gpus", rollout.rollout_num_gpus, rule, "Leave one of the three out.")]
        )
    return {"rollout_num_engines": count}


def check(config: RunConfig) -> list[Problem]:
    """Every rule between fields that is broken, in the order of the sections. Files are not looked at."""
    sections = (_check_run, _check_trainer, _check_rollout, _check_router, check_metrics)
    return [problem for section in sections for problem in section(config)]


def _check_run(config: RunConfig) -> list[Problem]:
    run = config.run
    problems = check_host(config)
    if run.max_staleness != 0:
        problems.append(
            Problem(
                "run.max_staleness",
                run.max_staleness,
                "must be 0: only the synchronous loop is offered",
                "Use --max-staleness 0.",
            )
        )
    if run.global_batch_size is not None and run.n_samples_per_prompt is not None and run.n_samples_per_prompt < 2:
        problems.append(
            Problem(
                "run.n_samples_per_prompt",
                run.n_samples_per_prompt,
                "must be at least 2 for grpo: a group of one has advantage 0 and nothing is learnt",
                "Use --n-samples-per-prompt 8.",
            )
        )
    return problems


def check_host(config: RunConfig) -> list[Problem]:
    """Where services may listen."""
    if is_loopback(config.run.host):
        return []
    rule = "must be a loopback address (127.0.0.1, ::1), since control surfaces carry no token"
    return [Problem("run.host", config.run.host, rule, "Use --host 127.0.0.1 or --host ::1.")]


def _check_trainer(config: RunConfig) -> list[Problem]:
    trainer = config.trainer
    problems = []
    if not config.model.hf_checkpoint:
        problems.append(Problem("model.hf_checkpoint", "", "must name a model folder", "Give --hf-checkpoint DIR."))
    if trainer.kl_loss_coef > 0 and not trainer.use_kl_loss:
        problems.append(
            Problem(
                "trainer.kl_loss_coef",
                trainer.kl_loss_coef,
                "has no effect without use_kl_loss",
                "Add --use-kl-loss, or leave --kl-loss-coef out.",
            )
        )
    if trainer.min_lr > trainer.lr:
        problems.append(Problem("trainer.min_lr", trainer.min_lr, f"must not be above lr ({trainer.lr})"))
    if trainer.trainer_num_nodes != 1:
        problems.append(
            Problem(
                "trainer.trainer_num_nodes",
                trainer.trainer_num_nodes,
                "must be 1: trainer ranks run on one node",
                "Use --trainer-num-nodes 1 and --trainer-num-ranks for the number of processes.",
            )
        )
    world = trainer.trainer_num_ranks * trainer.trainer_num_nodes
    batch = config.run.global_batch_size
    if batch is not None and batch < world:
        rule = f"must be at least the number of trainer ranks ({world})"
        problems.append(Problem("run.global_batch_size", batch, rule))
    problems += _check_profiler(config, world)
    return problems


def _check_profiler(config: RunConfig, world: int) -> list[Problem]:
    trainer = config.trainer
    start, end = trainer.profile_step_start, trainer.profile_step_end
    if not trainer.use_pytorch_profiler:
        names = ("profile_step_start", "profile_step_end", "profile_ranks", "tensorboard_dir")
        names += ("pytorch_profiler_collect_callstack", "pytorch_profiler_collect_shapes")
        given = [name for name in names if getattr(trainer, name) not in (None, (), "", False)]
        rule, remedy = "has no effect without use_pytorch_profiler", "Add --use-pytorch-profiler, or leave it out."
        return [Problem(f"trainer.{name}", getattr(trainer, name), rule, remedy) for name in given]
    problems = []
    if start is None or end is None or end <= start:
        window = {"profile_step_start": start, "profile_step_end": end}
        rule = "must be a window of rollouts, start below end"
        remedy = "For example --profile-step-start 1 --profile-step-end 2."
        problems.append(Problem("trainer", window, rule, remedy))
    if trainer.profile_ranks and min(trainer.profile_ranks) >= world:
        rule = f"none of them is below the number of trainer ranks ({world})"
        problems.append(Problem("trainer.profile_ranks", list(trainer.profile_ranks), rule, "Use --profile-ranks 0."))
    return problems


def _check_rollout(config: RunConfig) -> list[Problem]:
    rollout = config.rollout
    problems = []
    if not rollout.prompt_data:
        problems.append(Problem("rollout.prompt_data", "", "must name a JSON-lines file", "Give --prompt-data FILE."))
    if rollout.rollout_temperature == 0:
        rule = "must be above 0: greedy samples of one prompt are all the same"
        problems.append(Problem("rollout.rollout_temperature", 0, rule, "Use --rollout-temperature 1.0."))
    if bool(rollout.rm_type) == bool(rollout.custom_rm_path):
        value = {"rm_type": rollout.rm_type, "custom_rm_path": rollout.custom_rm_path}
        problems.append(
            Problem("rollout", value, "exactly one reward must be given", "Give --rm-type or --custom-rm-path.")
        )
    names = rollout.eval_prompt_data[::2]
    if len(rollout.eval_prompt_data) % 2 or len(set(names)) != len(names):
        rule = "must be pairs NAME FILE with distinct names"
        problems.append(Problem("rollout.eval_prompt_data", list(rollout.eval_prompt_data), rule))
    if config.run.eval_interval and not rollout.eval_prompt_data:
        rule = "needs evaluation data"
        remedy = "Give --eval-prompt-data NAME FILE, or leave --eval-interval out."
        problems.append(Problem("run.eval_interval", config.run.eval_interval, rule, remedy))
    if rollout.rollout_engine == "sglang" and not rollout.sglang_python:
        rule = "must name the python of the environment that SGLang is installed in"
        problems.append(Problem("rollout.sglang_python", "", rule, "Give --sglang-python PATH."))
    if rollout.rollout_engine == "cpu" and rollout.rollout_num_gpus_per_engine != 1:
        rule = "must be 1 with --rollout-engine cpu"
        problems.append(Problem("rollout.rollout_num_gpus_per_engine", rollout.rollout_num_gpus_per_engine, rule))
    return problems


def _check_router(config: RunConfig) -> list[Problem]:
    """The router's own rules, but for a host that is no loopback address: of --host that is told already."""
    told = bool(check_host(config)) and not config.router.router_host
    return [problem for problem in check_router(config) if not told or problem.key != "router.router_host"]


def check_metrics(config: RunConfig) -> list[Problem]:
    """The metrics section's own rules, which hold for a service alone too."""
    metrics = config.metrics
    problems = check_destinations(metrics)
    if "/" in metrics.wandb_group or "/" in metrics.wandb_project:
        value = {"wandb_project": metrics.wandb_project, "wandb_group": metrics.wandb_group}
        problems.append(Problem("metrics", value, "wandb project and group must not contain '/'"))
    return [*problems, *check_metrics_addr(config), *(_check_shared(config) if metrics.metrics_addr else [])]


def check_metrics_addr(config: RunConfig) -> list[Problem]:
    """An address that nothing could ever be sent to would be noticed by nobody: what is sent waits on disk."""
    address = config.metrics.metrics_addr
    if not address or re.fullmatch(r"[^\s/]+:\d{1,5}", address):
        return []
    rule, remedy = "must be HOST:PORT", "Give the gRPC address that `furlong metrics` prints, such as 10.0.0.5:8661."
    return [Problem("metrics.metrics_addr", address, rule, remedy)]


def _check_shared(config: RunConfig) -> list[Problem]:
    """A run that ships to a metrics service of many runs."""
    problems = []
    if config.run.name == RunSection().name:
        rule = "must be a name of its own with --metrics-addr: runs of one name in one service would be taken for one"
        problems.append(Problem("run.name", config.run.name, rule, "Give --name."))
    for name in OF_THE_SERVICE:
        if value := getattr(config.metrics, name):
            rule = "has no effect with --metrics-addr: the service there has sinks, files and rules of its own"
            problems.append(Problem(f"metrics.{name}", value, rule, f"Give --{_kebab(name)} to that service."))
    if config.metrics.alert_rules and not config.metrics.halt_on:  # --halt-on may name rules of the file
        rule = "has no effect with --metrics-addr: the service there watches the rules"
        remedy = "Give --alert-rules to that service; here it only tells --halt-on the names of rules."
        problems.append(Problem("metrics.alert_rules", config.metrics.alert_rules, rule, remedy))
    return problems


def _kebab(name: str) -> str:
    return name.replace("_", "-")
