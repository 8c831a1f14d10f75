"""The rollout service: prompts, sampling, rewards, evaluation, engines and their policy version."""
