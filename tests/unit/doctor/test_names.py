"""Names that settings choose: those of the table are what verl registers, and misspelt ones are reported."""

from pathlib import Path

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.names import NAMES, check_names
from verl_ext.settings import CONFIGS

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path={ROOT}/verl_ext/rollout/agent_loops.yaml"


@pytest.fixture
def run(make_run):
    """Make a run as `make_run` does, with the agent loops' YAML found from any folder."""
    return lambda name, *overrides: make_run(name, *([LOOPS] if "_dapo" in name else []), *overrides)


def test_the_table_has_what_verl_registers():
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    known = {key: set(names) for key, names in NAMES.items()}
    assert known["algorithm.adv_estimator"] == set(ADV_ESTIMATOR_REGISTRY)
    assert known[f"{ACTOR}.policy_loss.loss_mode"] == set(POLICY_LOSS_REGISTRY)
    assert known["trainer.v1.trainer_mode"] == set(TRAINER_REGISTRY)
    assert known["trainer.logger"] == set(Tracking.supported_backend)
    assert known[f"{ROLLOUT}.name"] == set(RolloutReplicaRegistry._registry)
    assert known["reward.reward_manager.name"] == set(REWARD_MANAGER)
    engines = known[f"{ROLLOUT}.checkpoint_engine.backend"]
    assert engines >= CheckpointEngineRegistry._registry.keys() - {"shared_file"}  # without those of absent packages
    assert all(len(names) > 1 for names in known.values())


@pytest.mark.parametrize("hardware", ["", "+hardware=cpu_tiny"])
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_our_own_runs_name_what_is_there(name, hardware, run, only_ok):
    if hardware and name.startswith("tiny"):
        pytest.skip("the tiny runs have a CPU in their defaults: cpu_tiny is for the large ones")
    only_ok(check_names(run(name, *[f"{hardware}{'_sft' * (name.endswith('_sft'))}"] * bool(hardware))))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=grop", "algorithm.adv_estimator is 'grop', expected a registered name -> Did "),
        ("algorithm.adv_estimator=null", "algorithm.adv_estimator is None, expected a registered name"),
        ("trainer.logger=[]", "trainer.logger is None, expected a registered name"),
        ("algorithm.adv_estimator=GRPO", "Did you mean grpo? Choose one of gae, gdpo"),
        ("algorithm.kl_penalty=low_var", "Did you mean low_var_kl?"),
        (f"{ACTOR}.kl_loss_type=k4", "actor_rollout_ref.actor.kl_loss_type is 'k4'"),
        (f"{ACTOR}.loss_agg_mode=token_mean", "Did you mean token-mean?"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "Did you mean vanilla?"),
        (f"{ACTOR}.strategy=fsdp3", "Did you mean fsdp"),
        (f"{ACTOR}.optim.lr_scheduler_type=cosin", "Did you mean cosine? Choose one of constant, cosine, wsd."),
        (f"{ACTOR}.optim.lr_decay_type=lin", "is 'lin', expected a registered name"),
        (
            f"{ACTOR}.optim.optimizer=AdamWW",
            "is 'AdamWW', expected a name that torch.optim defines -> Did you mean AdamW?",
        ),
        (f"{ACTOR}.optim._target_=verl_ext.trainer.lr_schedule.Config", "that verl_ext.trainer.lr_schedule defines"),
        (f"{ROLLOUT}.name=vlm", "Did you mean vllm?"),
        (f"{ROLLOUT}.agent.default_agent_loop=retol", "Did you mean retool?"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=verl_ext.rollout.workers.LeanManager", "LeanAgentLoopManager?"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=verl_ext.agents.Manager", "but there is no such module"),
        (f"{ROLLOUT}.checkpoint_engine.backend=ncll", "Did you mean nccl?"),
        ("reward.reward_manager.source=import", "is 'import'"),
        ("reward.reward_manager.name=RetoolManager", "Did you mean RetoolRewardManager?"),
        ("reward.reward_manager.module.path=pkg://verl_ext.rewards", "of pkg://verl_ext.rewards, but there is no"),
        ("+reward.reward_kwargs.overlong_counts=all", "Choose one of model, response."),
        ("retool.protocol=hermess", "retool.protocol is 'hermess', expected a registered name -> Did you mean he"),
        ("retool.traceback=lastline", "Did you mean last_line?"),
        ("retool.checkpoints.best_mode=maximum", "retool.checkpoints.best_mode is 'maximum'"),
        ("trainer.v1.trainer_mode=seperate_async", "Did you mean separate_async?"),
        ("trainer.v1.sampler.max_off_policy_strategy=skip", "Choose one of drop, wait."),
        ("trainer.v1.sampler.custom_sampler.name=DapoBuffer", "Did you mean DapoReplayBuffer?"),
        ("trainer.logger=[console,wanbd]", "trainer.logger is 'wanbd', expected a registered name -> Did you mean w"),
        ("trainer.logger=consol", "Did you mean console?"),
        ("trainer.device=gpu", "trainer.device is 'gpu'"),
        ("trainer.resume_mode=never", "Choose one of auto, disable, resume_path."),
    ],
)
def test_a_misspelt_name_of_an_rl_run(override, message, run, told):
    override = override.lstrip("+") if "overlong" in override else override
    texts = told(check_names(run("qwen2-32b_dapo", override)), Level.FAIL)
    assert len(texts) == 1 and message in texts[0], texts


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.retool.protocol=xml", "data.retool.protocol is 'xml'"),
        ("data.retool.bad_rows=skip", "Choose one of drop, error."),
        ("data.custom_cls.name=RetoolDataset", "Did you mean RetoolSFTDataset?"),
        ("optim.lr_scheduler_type=linear", "Choose one of constant, cosine, wsd."),
        ("engine.strategy=fsdp_2", "Did you mean fsdp2?"),
    ],
)
def test_a_misspelt_name_of_an_sft_run(override, message, run, told):
    texts = told(check_names(run("qwen2-32b_sft", override)), Level.FAIL)
    assert len(texts) == 1 and message in texts[0], texts


def test_a_reward_manager_of_verls_own(run, told, only_ok):
    own = ["reward.reward_manager.source=register", "reward.reward_manager.name=dapo"]
    only_ok(check_names(run("qwen2-32b_dapo", *own)))
    assert (
        "Did you mean dapo?"
        in told(check_names(run("qwen2-32b_dapo", own[0], "reward.reward_manager.name=dapoo")), Level.FAIL)[0]
    )


def test_the_classes_of_a_yaml(run, told, tmp_path):
    (tmp_path / "loops.yaml").write_text("- {name: retool, _target_: verl_ext.rollout.loop.RetoolLoop}\n")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: verl_ext.sandbox.tools.CodeInterpreter}]\n")
    own = [f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml", f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"]
    texts = told(check_names(run("qwen2-32b_dapo", *own)), Level.FAIL)
    assert len(texts) == 2 and "Did you mean RetoolAgentLoop?" in texts[0], texts
    assert "tools.yaml: class_name is CodeInterpreter of verl_ext.sandbox.tools, but there is no" in texts[1]


def test_a_yaml_that_is_not_there(run, told):
    texts = told(check_names(run("qwen2-32b_dapo", f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml")), Level.FAIL)
    assert "agent_loop_config_path is loops.yaml, but there is no such file (from " in texts[-1]


def test_a_class_of_a_file_of_ones_own(run, told, only_ok, tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    path = "trainer.v1.sampler.custom_sampler.path=mine.py"
    only_ok(check_names(run("qwen2-32b_dapo", path, "trainer.v1.sampler.custom_sampler.name=Mine")))
    text = told(check_names(run("qwen2-32b_dapo", path, "trainer.v1.sampler.custom_sampler.name=Mime")), Level.FAIL)[0]
    assert "expected a name that mine.py defines -> Did you mean Mine?" in text


MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("tool_config_path", None, "tool_config_path is mine, but there is no such file"),
        ("tool_config_path", "tool: []\n", "expected a list 'tools' whose entries have 'class_name': KeyError"),
        ("tool_config_path", "tools: [{name: x}]\n", "whose entries have 'class_name'"),
        ("tool_config_path", "tools: 3\n", "expected a list 'tools'"),
        ("tool_config_path", "tools: [\n", "expected a list 'tools'"),
        ("tool_config_path", "", "expected a list 'tools'"),
        ("function_tool_path", None, "function_tool_path is mine, but this file cannot be read"),
        ("function_tool_path", "def f(:\n", "function_tool_path is mine, expected Python: invalid syntax"),
    ],
)
def test_files_of_tools_that_are_missing_or_of_another_form(key, text, message, make_run, told, tmp_path):
    if text is not None:
        (tmp_path / "mine").write_text(text)
    loops = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/verl_ext/rollout/agent_loops.yaml"
    texts = told(check_names(make_run("qwen2-32b_dapo", loops, f"{MULTI_TURN}.{key}=mine")), Level.FAIL)
    assert len(texts) == 1 and message in texts[0], texts
