"""The fields of a run: one frozen section a service, each default in this one place.

Field names are the flags' names (`rollout_batch_size` is `--rollout-batch-size`), and keep Miles' names where Miles has
them. `Also` names other spellings that are taken for the same flag. No rule between fields stands here (see rules.py).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


@dataclass(frozen=True)
class Also:
    """Other flag names for a field."""

    names: tuple[str, ...]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings shown by --help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class RunSection(Section):
    """The run as a whole: its name, its size, its seed."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run: letters, digits, dot, dash and underscore."""
    run_dir: str = ""
    """Folder for everything the run writes. Empty: runs/NAME."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1234
    """Seed of everything random in the run: data order, sampling, initial noise."""
    num_rollout: Count = 100
    """Rollouts (iterations) to train."""
    rollout_batch_size: Count | None = None
    """Prompts a rollout."""
    n_samples_per_prompt: Count | None = None
    """Samples for each prompt: the size of a group."""
    global_batch_size: Count | None = None
    """Samples an optimiser step. Of rollout_batch_size x n_samples_per_prompt = global_batch_size x
    num_steps_per_rollout the one that is not given follows."""
    num_steps_per_rollout: Count | None = None
    """Optimiser steps a rollout."""
    save_interval: Annotated[int, Field(ge=0)] = 0
    """Write a checkpoint after every so many rollouts, and at the end. 0: only at the end and on a stop."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept; older ones are removed once a newer one is complete."""
    eval_interval: Annotated[int, Field(ge=0)] = 0
    """Evaluate after every so many rollouts, before the first and after the last. 0: never."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many policy versions rollout may run ahead. 0: the synchronous loop."""
    host: str = "127.0.0.1"
    """Address that the services listen on: an address of this host's loopback interface, IPv4 or IPv6."""
    start_timeout_s: Positive = 180.0
    """Seconds that a service, and what it waits for, may take to start."""
    call_timeout_s: Positive = 120.0
    """Seconds that a call between services may take, unless it has a limit of its own."""
    drain_budget_s: Positive = 30.0
    """Seconds that a stop may take after the first Ctrl-C: a run finishes its iteration and saves, a service alone
    finishes what it is answering."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Form of the trainer's row and of alerts on stdout: text for people, json for one object a line."""


class ModelSection(Section):
    """The model that is trained."""

    hf_checkpoint: str = ""
    """Folder of a transformers causal LM: config.json, safetensors weights, tokenizer.json."""
    tokenizer: str = ""
    """Folder of the tokenizer, if it is not in hf_checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the model computes in, on trainer and engines. The optimiser's master weights are float32."""


class TrainerSection(Section):
    """The trainer: the algorithm, the optimiser, the ranks."""

    train_backend: Literal["fsdp"] = "fsdp"
    """Training engine."""
    trainer_num_ranks: Annotated[Count, Also(("actor-num-gpus-per-node",))] = 1
    """Trainer processes on this node, one a device."""
    trainer_num_nodes: Annotated[Count, Also(("actor-num-nodes",))] = 1
    """Nodes that trainer ranks run on."""
    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer ranks. auto: cuda if there is one, else cpu."""
    trainer_num_threads: Count = 1
    """Threads that torch uses in each trainer rank on the CPU."""
    lr: NonNegative = 1e-6
    """Peak learning rate of AdamW."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, over all optimiser steps of the run."""
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps in which the learning rate rises linearly from 0 to lr."""
    min_lr: NonNegative = 0.0
    """Where a falling learning rate ends."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW; not applied to vectors (norms, biases)."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first beta."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """AdamW's second beta."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad: NonNegative = 1.0
    """Largest global L2 norm of the gradient; a larger one is scaled down. 0: no clipping."""
    advantage_estimator: Literal["grpo"] = "grpo"
    """How rewards become advantages. grpo: (reward - mean of the group) / (std of the group + 1e-6)."""
    disable_grpo_std_normalization: bool = False
    """Leave the division by the group's standard deviation out."""
    eps_clip: Fraction = 0.2
    """Lower clip of the importance ratio: 1 - eps_clip."""
    eps_clip_high: NonNegative | None = None
    """Upper clip of the importance ratio: 1 + eps_clip_high. Not given: eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound of the loss for negative advantages, as a multiple of the advantage. Not given: no dual clip."""
    use_kl_loss: bool = False
    """Add kl_loss_coef x KL(policy, frozen reference) to the loss."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the KL, with d = lp - lp_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, low_var_kl = k3 bounded to
    [-10, 10]."""
    ref_load: str = ""
    """Folder of the reference model. Empty: hf_checkpoint."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: bool = False
    """Average the loss over trained tokens instead of over sequences."""
    use_rollout_logprobs: bool = False
    """Take the engines' log-probs as lp_old instead of computing them again."""
    max_tokens_per_gpu: Count = 8192
    """Most tokens, padding included, in one micro-batch of one rank."""
    update_weight_mode: Literal["broadcast"] = "broadcast"
    """How weights go to the engines."""
    update_weight_buffer_size: Count = 64 * 1024 * 1024
    """Bytes in one bucket of a weight update."""
    update_weight_timeout_s: Positive = 60.0
    """Seconds that each step of a weight update may take."""
    distributed_timeout_s: Positive = 120.0
    """Seconds that a collective among trainer ranks may take. No rank waits for a rollout inside one."""
    use_pytorch_profiler: bool = False
    """Record whole training steps with torch's profiler, rollouts profile_step_start .. profile_step_end - 1."""
    profile_step_start: Annotated[int, Field(ge=0)] | None = None
    """First rollout id that is profiled."""
    profile_step_end: Annotated[int, Field(ge=1)] | None = None
    """One past the last rollout id that is profiled."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Global ranks that are profiled. Empty: every rank."""
    tensorboard_dir: str = ""
    """Folder of the traces, one gzipped file a traced rank. Empty: traces in the run directory."""
    pytorch_profiler_collect_callstack: bool = False
    """Record Python call stacks too; slower, larger traces."""
    pytorch_profiler_collect_shapes: bool = False
    """Record the shapes of operators' arguments too."""


class RolloutSection(Section):
    """Rollout: prompts, sampling, rewards, evaluation, engines."""

    prompt_data: str = ""
    """JSON-lines file of prompts."""
    input_key: str = "prompt"
    """Key of the prompt in a line: a string, or with apply_chat_template a list of messages or a string."""
    label_key: str = "label"
    """Key of the label in a line. A line without it has no label."""
    metadata_key: str = "metadata"
    """Key of an object that is handed to reward functions and hooks as it is."""
    apply_chat_template: bool = False
    """Turn prompts into the tokenizer's chat format."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew in each epoch, by the run's seed."""
    rollout_max_prompt_len: Count | None = None
    """Most tokens in a prompt; longer prompts are left out at the start, and counted."""
    rollout_max_response_len: Count = 256
    """Most tokens in a response."""
    rollout_temperature: NonNegative = 1.0
    """Sampling temperature; the trainer scores with the same. 0 (greedy) is refused for training."""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability."""
    rollout_top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens. -1: all."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a response, besides the model's own end of sequence."""
    rm_type: Literal["last_number", "exact_match"] | None = None
    """Built-in reward. last_number: 1 if the last number in the response equals the label's, else 0. exact_match: 1 if
    the response, stripped, equals the label."""
    custom_rm_path: str = ""
    """Reward function of your own, `pkg.mod.fn`: fn(args, sample) -> number or dict; sync or async. As a flag it takes
    the place of the file's rm_type."""
    log_reward_category: str = ""
    """Key of a category in the dict that the reward function gives: rollout/error_cat/CATEGORY is each one's share."""
    reward_key: str = ""
    """Key of the reward when the function gives a dict."""
    rm_timeout_s: Positive = 30.0
    """Seconds that one reward may take; a slower one fails its sample."""
    rm_num_workers: Count = 4
    """Threads that compute rewards."""
    custom_rollout_log_function_path: str = ""
    """Hook `pkg.mod.fn`: fn(rollout_id, args, samples, extra, rollout_time) -> bool. True: the default values are not
    logged."""
    custom_eval_rollout_log_function_path: str = ""
    """Hook `pkg.mod.fn`: fn(rollout_id, args, data, extra) -> bool; True: the default values are not logged."""
    log_hook_timeout_s: Positive = 30.0
    """Seconds that a log hook may take."""
    log_passrate: bool = False
    """Log passrate/pass@k."""
    log_samples: Annotated[int, Field(ge=0, le=8)] = 0
    """Samples of each rollout that are logged with their text, as the table rollout/samples: the first ones."""
    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation sets, as pairs: NAME FILE [NAME FILE ...]."""
    n_samples_per_eval_prompt: Count = 1
    """Samples for each evaluation prompt."""
    eval_temperature: NonNegative | None = None
    """Sampling temperature in evaluation; 0: greedy. Not given: rollout_temperature."""
    eval_top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """top-p in evaluation. Not given: rollout_top_p."""
    eval_max_response_len: Count | None = None
    """Most tokens in an evaluation response. Not given: rollout_max_response_len."""
    rollout_engine: Literal["cpu", "sglang"] = "cpu"
    """What generates: the CPU engine, or SGLang in an environment of its own."""
    rollout_num_engines: Count = 1
    """Engines to start."""
    rollout_num_gpus: Count | None = None
    """Miles' way to say it: rollout_num_engines x rollout_num_gpus_per_engine. On a CPU run a device is a process."""
    rollout_num_gpus_per_engine: Count = 1
    """Devices an engine takes (SGLang's tensor-parallel size)."""
    sglang_python: str = ""
    """Python interpreter of the environment that SGLang is installed in."""
    sglang_launcher: str = ""
    """Script to start SGLang with instead of `-m sglang.launch_server`."""
    sglang_args: tuple[str, ...] = ()
    """More arguments for SGLang, as they are."""
    engine_max_running_requests: Count = 256
    """Sequences that one engine decodes at once."""
    engine_max_total_tokens: Count | None = None
    """Tokens of KV cache an engine. Not given: what the engine chooses (SGLang on a CPU: 65536)."""
    engine_num_threads: Count = 1
    """Threads that the CPU engine's torch uses."""
    rollout_request_timeout_s: Positive = 600.0
    """Seconds that one generation may take."""
    rollout_max_in_flight: Count = 256
    """Samples that are asked for at once."""
    rollout_addr: str = ""
    """gRPC address of a rollout service that runs elsewhere. Empty: found in the run directory."""


class RouterSection(Section):
    """The router in front of the engines."""

    router_port: Port = 0
    """HTTP port. 0: a free one."""
    router_host: str = ""
    """Address that the router listens on. Empty: that of --host. Other than loopback needs --router-token-file."""
    router_grpc_port: Port = 0
    """gRPC port. 0: a free one. A router alone answers gRPC only with this flag or --require-policy-version."""
    router_addr: str = ""
    """HTTP and gRPC address of a router that runs elsewhere, `http://HOST:PORT,HOST:GRPC_PORT`. Empty: found in the run
    directory. Of an https one --router-tls-cert may name a certificate to trust."""
    router_worker_urls: tuple[str, ...] = ()
    """Workers that are registered from the start; one that is down is looked after until it comes."""
    router_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that pass requests on, for more than one core can carry."""
    router_require_policy_version: bool = True
    """Send requests only to workers whose policy version the rollout service has confirmed, unless they were registered
    over HTTP. Not needed without Furlong's rollout service."""
    router_policy: Literal["least-in-flight", "round-robin", "power-of-two", "session", "prefix"] = "least-in-flight"
    """Which worker takes a request. session: all of one session the same one; prefix: prompts that begin alike the same
    one."""
    router_session_key: str = "header:x-session-id"
    """Where the session's name stands, `header:NAME` or `body:KEY` (a key of the JSON body). For --router-policy
    session."""
    router_prefix_chars: Count = 256
    """So many characters (or token ids) of a prompt's start decide. For --router-policy prefix."""
    router_bounded_load: Annotated[float, Field(ge=1.0)] = 1.25
    """A worker with more than so many times the mean of requests in flight takes no more by affinity."""
    router_max_in_flight: Annotated[int, Field(ge=0)] = 0
    """Requests that a worker may be answering at once; more of them wait. 0: no limit."""
    router_max_queued: Count = 4096
    """Requests that may wait for a worker at once; one more is answered 503."""
    router_queue_timeout_s: Positive = 60.0
    """Seconds that a request may wait for a worker before it is answered 503."""
    router_max_tries: Count = 3
    """Workers that one request may be tried on. It is tried again only if it cannot have run."""
    router_connect_timeout_s: Positive = 5.0
    """Seconds that a connection to a worker may take."""
    router_first_byte_timeout_s: Positive = 900.0
    """Seconds that a worker may take until its first byte."""
    router_idle_timeout_s: Positive = 900.0
    """Seconds that may pass between two pieces of an answer, or of a client's request."""
    router_total_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a request may take in all. 0: no limit; generations are long."""
    router_client_head_timeout_s: Positive = 30.0
    """Seconds that a client may take to send a request's head."""
    router_client_keep_alive_s: Positive = 75.0
    """Seconds that an unused connection of a client is kept."""
    router_max_connections: Count = 16384
    """Connections of clients at once; one more is answered 503 and closed."""
    router_max_head_bytes: Count = 64 * 1024
    """Bytes that a request's line and headers may have."""
    router_max_url_bytes: Count = 16 * 1024
    """Bytes that a request's target may have."""
    router_max_body_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes that a request's body may have. 0: no limit; bodies are never held whole."""
    router_health_interval_s: Positive = 2.0
    """Seconds between health probes of a worker."""
    router_health_timeout_s: Positive = 10.0
    """Seconds that a probe may take."""
    router_health_fail_threshold: Count = 3
    """Failed probes in a row that take a worker out."""
    router_health_success_threshold: Count = 1
    """Good probes in a row that bring it back."""
    router_health_busy_grace_s: Positive = 120.0
    """Seconds without a byte from a worker with requests until probes that it misses count: busy is not dead."""
    router_breaker_failures: Count = 5
    """Failed requests in a row that open a worker's circuit breaker. It then gets one request at a time, to see whether
    it is well again, while others serve."""
    router_breaker_pause_s: Positive = 2.0
    """Seconds between such requests."""
    router_max_workers: Count = 1024
    """Workers that may be registered."""
    router_worker_allow: tuple[str, ...] = ()
    """Hosts, HOST:PORT or networks (10.0.0.0/8) that workers may have. Empty: any but link-local addresses."""
    router_token_file: str = ""
    """File with the token that control paths and engines' admin paths need, as `Authorization: Bearer TOKEN`. Empty:
    control paths are open, which only a router on the loopback interface may be, and admin paths are refused."""
    router_tls_cert: str = ""
    """Certificate (PEM, the whole chain) to serve HTTPS with."""
    router_tls_key: str = ""
    """Private key (PEM) of --router-tls-cert."""
    router_worker_ca: str = ""
    """CA certificates (PEM) that https workers are checked against. Empty: the system's."""
    router_access_log_every: Annotated[int, Field(ge=0)] = 1000
    """One in so many good requests gets a line in the access log, each bad one does. 1: all; 0: only bad ones."""


class MetricsSection(Section):
    """The metrics service and its sinks."""

    metrics_port: Port = 0
    """HTTP port. 0: a free one."""
    metrics_grpc_port: Port = 0
    """gRPC port. 0: a free one."""
    metrics_addr: str = ""
    """gRPC address of a metrics service that runs elsewhere. Empty: a run's own; a router alone then has none."""
    metrics_row_timeout_s: Positive = 30.0
    """Seconds that a row waits for the rest of its contributors before it is handed on, marked incomplete."""
    telemetry_queue_size: Count = 10000
    """Records that a process holds while they are on their way."""
    telemetry_spool_bytes: Count = 64 * 1024 * 1024
    """Bytes of records that a process keeps on disk while the metrics service is away."""
    use_wandb: bool = False
    """Hand the rows to Weights & Biases. The key comes from WANDB_API_KEY or WANDB_API_KEY_FILE, never from a flag."""
    wandb_project: str = ""
    """wandb project. Empty: furlong."""
    wandb_group: str = ""
    """wandb group."""
    wandb_team: str = ""
    """wandb team (entity)."""
    wandb_run_name: str = ""
    """Name shown in wandb. Empty: the run's name."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Not given: online if there is a key, else offline."""
    wandb_dir: str = ""
    """Folder for wandb's files. Empty: the run directory."""
    wandb_init_timeout_s: Positive = 30.0
    """Seconds that wandb may take to start; training never waits for it."""
    use_tensorboard: bool = False
    """Write the rows as TensorBoard event files."""
    metrics_tensorboard_dir: str = ""
    """Folder of the event files, one folder a run below it. Empty: tensorboard/ in the run directory."""
    mlflow_tracking_uri: str = ""
    """Hand the rows to the MLflow server there. Credentials come from MLflow's own environment variables."""
    mlflow_experiment: str = ""
    """MLflow experiment. Empty: furlong."""
    prometheus_stale_s: Positive = 3600.0
    """Seconds without a row after which a run is no longer shown to Prometheus at /metrics."""
    statsd_addr: str = ""
    """HOST:PORT of a statsd daemon that gets the rows as gauges."""
    statsd_prefix: str = "furlong"
    """First part of the names in statsd."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) that gets rows as metrics and log lines as logs. Headers
    come from OTEL_EXPORTER_OTLP_HEADERS."""
    metrics_webhook: str = ""
    """URL that gets every row as JSON by POST. @FILE: the URL stands in that file, where a secret in it is safe."""
    metrics_sink: tuple[str, ...] = ()
    """Sinks of your own, as `pkg.mod.Class`: init, write rows, flush, close."""
    metrics_sink_memory_bytes: Annotated[int, Field(ge=0)] = 2 * 1024 * 1024 * 1024
    """Memory that the process of one sink may take; beyond that it is started anew. 0: no limit."""
    tail: tuple[str, ...] = ()
    """Log files of other programs to follow, as paths or globs."""
    scrape: tuple[str, ...] = ()
    """Prometheus endpoints of engines to read, as URLs."""
    scrape_interval_s: Positive = 10.0
    """Seconds between two readings of an endpoint, and between two rows of engine metrics."""
    metrics_retention_days: NonNegative = 0.0
    """Days that log lines and rows are kept. 0: for ever."""
    metrics_retention_bytes: Annotated[int, Field(ge=0)] = 10 * 1024 * 1024 * 1024
    """Size of the durable log above which the oldest records are removed. 0: no limit."""
    metrics_min_free_bytes: Annotated[int, Field(ge=0)] = 64 * 1024 * 1024
    """Free bytes of the disk below which producers are told to hold their records."""
    alert_rules: str = ""
    """TOML file with alert rules of your own, and other thresholds for the built-in ones."""
    disable_alerts: tuple[str, ...] = ()
    """Names of alert rules that are not watched."""
    halt_on: tuple[str, ...] = ()
    """Names of alert rules that stop the run when they fire."""
    alert_webhook: str = ""
    """URL that gets every alert as JSON by POST. @FILE: the URL stands in that file."""
    alert_slack_webhook_file: str = ""
    """File that holds the URL of a Slack webhook that gets every alert. The variable FURLONG_SLACK_WEBHOOK_URL does the
    same."""


class RunConfig(Section):
    """A whole run, resolved: every value that follows from others is filled in, every rule holds."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    router: RouterSection = RouterSection()
    metrics: MetricsSection = MetricsSection()
