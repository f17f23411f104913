"""Write a small task for the environment `search`: invented people and towns, and questions that need two documents.

    python data/prepare_lookup.py --out outputs/lookup/data

    retool.environment: {name: search, corpus: outputs/lookup/data/corpus.jsonl}

"How many bridges has the town in which Orla Venn lives?" needs the document of a person, which names the town, and the
town's. No model can know the facts. The people and towns of the test are none of training's. Deterministic in `--seed`;
no network. The texts are ours and under this repository's licence. The SFT traces are in the hermes protocol, with what
the tools say to their calls.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from verl_ext.datasets.text import PROMPTS
from verl_ext.environments.search import Search
from verl_ext.runs import parquet

DATA_SOURCE = "lookup"
SYLLABLES = "bar del fen gor hal jin kas lor mev nur pol rin sul tam ver wex yor zan".split()
TRADES = ["a baker", "a clockmaker", "a ferryman", "a glazier", "a miller", "a potter", "a weaver"]
NUMBERS = {"inhabitants": (900, 9000), "bridges": (2, 40), "wells": (3, 60), "mills": (2, 30)}
TOWN = (
    "{name} is a town on the river {river}. Most of its houses are of {stone}, and its market is held on {day}. "
    "According to the last count, it has {inhabitants} inhabitants. Travellers remember its {bridges} bridges, while "
    "those who live there prefer to speak of its {wells} wells and of its {mills} mills."
)
PERSON = (
    "{name} is {trade}, and learned the trade from an aunt in another country. {name} was born near the river {river}, "
    "moved often when young, and for {years} years has lived in the town of {town}."
)


def names(rng: random.Random, syllables: int) -> Iterator[str]:
    """Yield different names; with a further syllable when all shorter ones are used."""
    seen = set()
    while True:
        name = "".join(rng.choices(SYLLABLES, k=syllables)).capitalize()
        if name not in seen:
            seen.add(name)
            yield name
            if len(seen) == len(SYLLABLES) ** syllables:
                seen, syllables = set(), syllables + 1


def make_facts(rng: random.Random, people: int, towns: Iterator[str]) -> tuple[list[dict], list[dict]]:
    """Return the documents of people and of their towns, and a question about each person."""
    documents, questions, places = [], [], []
    for name in (next(towns) for _ in range(max(2, people // 4))):
        numbers = {what: rng.randint(*bounds) for what, bounds in NUMBERS.items()}
        river, stone, day = next(towns), rng.choice(["granite", "brick", "slate"]), rng.choice(["Monday", "Friday"])
        text = TOWN.format(name=name, river=river, stone=stone, day=day, **numbers)
        places.append((name, river, numbers))
        documents.append({"id": f"town-{name.lower()}", "title": name, "text": text})
    for _ in range(people):
        name, (town, _, numbers) = f"{next(towns)} {next(towns)}", rng.choice(places)
        what = rng.choice(list(NUMBERS))
        others = {"trade": rng.choice(TRADES), "river": rng.choice(places)[1], "years": rng.randint(2, 40)}
        id = f"person-{name.lower().replace(' ', '-')}"
        documents.append({"id": id, "title": name, "text": PERSON.format(name=name, town=town, **others)})
        text = f"How many {what} has the town in which {name} lives?"
        questions.append({"text": text, "answer": str(numbers[what]), "person": name, "town": town})
    return documents, questions


def rl_row(question: dict, index: int, split: str) -> dict:
    """Return a row in verl's RL columns."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": PROMPTS["hermes"].format(problem=question["text"])}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": question["answer"]},
        "extra_info": {"index": index, "split": split},
    }


def sft_row(question: dict, search: Search, tools: str) -> dict:
    """Return a trace that finds the person, reads where they live, and reads about the town."""
    town = f"town-{question['town'].lower()}"
    person = f"person-{question['person'].lower().replace(' ', '-')}"
    messages = rl_row(question, 0, "train")["prompt"]
    for name, arguments in (
        ("search", {"query": question["person"]}),
        ("read", {"id": person}),
        ("search", {"query": question["town"]}),
        ("read", {"id": town}),
    ):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": getattr(search, name)(**arguments)})
    messages.append({"role": "assistant", "content": f"\\boxed{{{question['answer']}}}"})
    return {"messages": json.dumps(messages), "tools": tools}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for corpus.jsonl and the parquet files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", type=int, default=256, help="SFT traces (default: %(default)s)")
    parser.add_argument("--rl", type=int, default=1024, help="RL questions (default: %(default)s)")
    parser.add_argument("--test", type=int, default=128, help="held-out questions (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    rng = random.Random(args.seed)
    invented = names(rng, 3)
    sft, rl, test = (make_facts(rng, count, invented) for count in (args.sft, args.rl, args.test))
    documents = [document for part in (sft, rl, test) for document in part[0]]
    corpus = args.out / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in rng.sample(documents, len(documents))))
    print(f"{corpus}: {len(documents)} documents, such as")
    print(f"  {documents[0]['text']}\n  {documents[-1]['text']}")

    search = Search(corpus=str(corpus))
    tools = json.dumps(list(Search.schemas(corpus=str(corpus)).values()))
    tables = {
        "sft_train": [sft_row(question, search, tools) for question in sft[1]],
        "rl_train": [rl_row(question, i, "train") for i, question in enumerate(rl[1])],
        "eval": [rl_row(question, i, "test") for i, question in enumerate(test[1])],
    }
    for name, rows in tables.items():
        path = args.out / f"{name}.parquet"
        print(f"{path}: {parquet.write(path, pa.Table.from_pylist(rows))} rows")
    for message in json.loads(tables["sft_train"][0]["messages"]):
        print(f"  {message['role']:>9}: {message['content'] or message['tool_calls'][0]['function']}")


if __name__ == "__main__":
    main()
