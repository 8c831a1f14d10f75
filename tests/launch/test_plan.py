"""What `furlong up` starts, and with which environment."""

from pathlib import Path

from furlong.launch.plan import ChildPlan, plan_children
from tests.launch.runs import read, small_run

ENVIRONMENT = {"WANDB_API_KEY": "SECRET123", "WANDB_SERVICE": "2-1-tcp", "HF_TOKEN": "t", "OMP_NUM_THREADS": "2"}


def plans(root: Path, *flags: str) -> dict[str, ChildPlan]:
    config = read(small_run(root), *flags)
    planned = plan_children(config, config_path=Path("c.toml"), parent_pid=7, environment=ENVIRONMENT)
    return {plan.instance: plan for plan in planned}


def test_one_process_a_service_and_one_a_trainer_rank(tmp_path: Path) -> None:
    assert list(plans(tmp_path, "--trainer-num-ranks", "2")) == [
        "metrics",
        "router",
        "rollout",
        "trainer-0",
        "trainer-1",
    ]


def test_service_that_runs_elsewhere_is_not_started(tmp_path: Path) -> None:
    assert "metrics" not in plans(tmp_path, "--metrics-addr", "127.0.0.1:4000")


def test_wandb_key_reaches_the_metrics_service_alone(tmp_path: Path) -> None:
    holders = [name for name, plan in plans(tmp_path).items() if "WANDB_API_KEY" in plan.environment]
    assert holders == ["metrics"]


def test_no_command_line_holds_a_secret(tmp_path: Path) -> None:
    assert not any("SECRET" in word for plan in plans(tmp_path).values() for word in plan.command)


def test_environment_is_passed_on_and_what_is_set_wins_over_our_defaults(tmp_path: Path) -> None:
    trainer = plans(tmp_path)["trainer-0"].environment
    assert (trainer["HF_TOKEN"], trainer["OMP_NUM_THREADS"], trainer["HF_HUB_OFFLINE"]) == ("t", "2", "1")
    assert "WANDB_SERVICE" not in plans_environment_of_metrics(tmp_path / "again")


def plans_environment_of_metrics(root: Path) -> dict[str, str]:
    root.mkdir()
    return dict(plans(root)["metrics"].environment)
