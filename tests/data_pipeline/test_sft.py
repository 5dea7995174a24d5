import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data.conversations import encode_record
from jaxpar.data.dataset import load_dataset
from jaxpar.data.record_rows import rows_of_records
from jaxpar.data.tokenizers import load_tokenizer
from tests.data_pipeline.test_tokenizers import save_bpe

DATA = Path(__file__).parents[1] / "data" / "sft"
PAIR = {"prompt": "2 + 3 = ", "response": "5"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao."},
    ]
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(*records, path="a.jsonl"):
    Path(path).write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def load(*records, **fields):
    if records:
        write(*records)
    fields = {"source": "sft", "paths": ("*.jsonl",), "seq_len": 128, "chat_template": "chatml"} | fields
    return load_dataset(DataConfig(**fields), vocab_size=0, seed=0)


def rows_of(dataset):
    return [dataset[i] for i in range(len(dataset))]


def test_a_prompt_and_a_response_are_tokenized_each_on_its_own_and_only_the_response_is_trained():
    row = load(PAIR).train[0]
    assert row["tokens"][:9].tolist() == list(b"2 + 3 = 5")
    assert row["labels"][:9].tolist() == [*b" + 3 = 5", 256]
    assert row["weights"].tolist() == [0] * 7 + [1, 1] + [0] * 119
    assert row["positions"][:9].tolist() == list(range(9))


@pytest.mark.parametrize("tokenizer", ["bytes", str(DATA / "tokenizer.json")])
def test_only_the_answers_of_a_conversation_are_trained(tokenizer):
    row = load(CHAT, tokenizer=tokenizer, seq_len=256).train[0]
    tokenizer = load_tokenizer(tokenizer)
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nCiao.<|im_end|>\n"
    )
    ids = tokenizer.encode(text)
    assert row["tokens"][: len(ids) - 1].tolist() == ids[:-1].tolist()
    assert row["labels"][: len(ids) - 1].tolist() == ids[1:].tolist()
    answers = np.concatenate([tokenizer.encode(answer) for answer in ("Hello.<|im_end|>\n", "Ciao.<|im_end|>\n")])
    assert row["labels"][row["weights"] == 1].tolist() == answers.tolist()


def test_a_token_that_began_in_the_prompt_is_not_trained():
    # " cat" is one token, and the template has nothing between the prompt's "the c" and the answer's "at sat".
    save_bpe("tokenizer.json", ["</s>"])
    tokenizer = load_tokenizer("tokenizer.json")

    def template(messages, *, add_generation_prompt, tools=None):
        return "".join(message["content"] for message in messages)

    messages = [{"role": "user", "content": "the c"}, {"role": "assistant", "content": "at sat"}]
    example = encode_record({"messages": messages}, tokenizer, template)
    assert tokenizer.decode(example.tokens) == "the cat sat"
    assert tokenizer.decode(example.tokens[example.trained]) == " sat"


@given(st.text(max_size=20))
def test_starts_of_bytes_are_characters(text):
    ids, starts = load_tokenizer("bytes").encode_with_starts(text)
    assert ids.tolist() == list(text.encode())
    assert "".join(text[start] for start in dict.fromkeys(starts.tolist())) == text
    assert starts.tolist() == [i for i, character in enumerate(text) for _ in character.encode()]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=60), st.booleans())
def test_every_record_is_whole_and_in_one_row(num_pairs, pack):
    rows = rows_of_records(num_pairs, 20, pack=pack)
    assert sorted(record for row in rows for record in row) == list(range(len(num_pairs)))
    filled = [sum(num_pairs[record] for record in row) for row in rows]
    assert all(0 < pairs <= 20 for pairs in filled)
    if pack:
        # Best fit: no two rows would fit in one.
        assert all(a + b > 20 for i, a in enumerate(filled) for b in filled[i + 1 :])
    else:
        assert rows == [[record] for record in range(len(num_pairs))]


def test_rows_of_many_records_are_nearly_full():
    num_pairs = np.random.default_rng(0).integers(1, 1000, 10_000).tolist()
    rows = rows_of_records(num_pairs, 1024, pack=True)
    assert len(rows) < 1.02 * sum(num_pairs) / 1024
    # The order is kept, but for a few thousand records.
    assert max(abs(min(row) - 10_000 * i / len(rows)) for i, row in enumerate(rows)) < 6000


@pytest.mark.parametrize("pack", [True, False])
def test_packed_records_are_isolated_and_the_same_as_alone(pack):
    pairs = [{"prompt": "p" * n, "response": f"r{n}"} for n in (3, 30, 7, 50, 11)]
    dataset = load(*pairs, pack=pack, seq_len=64).train
    assert len(dataset) == (2 if pack else 5)
    found = {}
    for row in rows_of(dataset):
        for segment in range(1, row["segment_ids"].max() + 1):
            mine = row["segment_ids"] == segment
            assert row["positions"][mine].tolist() == list(range(mine.sum()))
            labels = row["labels"][mine & (row["weights"] == 1)]
            found[bytes(row["tokens"][mine].tolist())] = labels.tolist()
    assert found == {f"{'p' * n}r{n}".encode(): [*f"r{n}".encode(), 256] for n in (3, 30, 7, 50, 11)}


def test_records_longer_than_a_row_are_refused_left_out_or_cut():
    long = {"prompt": "p" * 20, "response": "r" * 30}
    hopeless = {"prompt": "p" * 60, "response": "r"}
    with pytest.raises(ConfigError, match=r"seq_len = 32: 2 of 3 records are longer.*a.jsonl:3, has 61") as caught:
        load(PAIR, long, hopeless, seq_len=32)
    assert 'raise data.seq_len to 61, or set data.too_long = "drop" or "truncate"' in str(caught.value)
    assert load(PAIR, long, hopeless, seq_len=61).num_documents == 3
    dropped = load(PAIR, long, hopeless, seq_len=32, too_long="drop")
    assert dropped.num_documents == 1
    assert "2 records are longer than data.seq_len = 32 and are left out" in dropped.notes
    cut = load(PAIR, long, hopeless, seq_len=32, too_long="truncate", pack=False)
    assert cut.num_documents == 2
    assert bytes(cut.train[1]["labels"].astype(np.uint8)) == b"p" * 19 + b"r" * 13
    assert cut.train[1]["weights"].tolist() == [0] * 19 + [1] * 13
    with pytest.raises(ConfigError, match="1 of the records are longer than a row"):
        load(hopeless, seq_len=32, too_long="truncate")


def test_validation_holds_whole_records_out():
    records = [{"prompt": f"{i} ", "response": "x"} for i in range(50)]
    split = load(*records, pack=False, validation_fraction=0.3)
    sides = [
        {bytes(row["tokens"][:3].astype(np.uint8)) for row in rows_of(side)} for side in (split.train, split.validation)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 50
    assert f"validation: {len(split.validation)} of 50 records" in split.notes[-1]
    tokenized = load(*records, pack=False, validation_fraction=0.3, tokenizer=str(DATA / "tokenizer.json"))
    assert len(tokenized.validation) == len(split.validation)


def test_the_identity_covers_what_is_trained():
    base = load(CHAT, PAIR, seq_len=256).train.fingerprint
    assert load(CHAT, PAIR, seq_len=256).train.fingerprint == base
    assert load(PAIR, CHAT, seq_len=256).train.fingerprint != base
    swapped = {"prompt": "2 + 3", "response": " = 5"}
    assert load(CHAT, swapped, seq_len=256).train.fingerprint != base


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "neither prompt and response nor messages, but 'text'"),
        ({"prompt": "x", "response": ""}, "response is empty"),
        ({"prompt": ["x"], "response": "y"}, "prompt is not a string, but list"),
        ({"messages": "x"}, "not a list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "not a list of objects with role and content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no response, so nothing"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "chatml takes text"),
        ({**CHAT, "tools": []}, "chatml has no place for tools"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_malformed_record_is_named_by_its_line(record, message):
    with pytest.raises(ConfigError, match=rf"a.jsonl:2: .*{message}"):
        load(PAIR, record)


def test_messages_without_a_template_say_where_it_was_looked_for():
    with pytest.raises(ConfigError, match=r'a.jsonl:1 has messages.*the "bytes" tokenizer has none(?s:.*)"chatml"'):
        load(CHAT, chat_template=None)
    with pytest.raises(ConfigError, match=rf"looked for chat_template.jinja and tokenizer_config.json in {DATA}"):
        load(CHAT, chat_template=None, tokenizer=str(DATA / "tokenizer.json"))
    assert load(PAIR, chat_template=None).num_documents == 1
    with pytest.raises(ConfigError, match=r"data.chat_template = 'none.jinja': cannot be read"):
        load(PAIR, chat_template="none.jinja")


def test_a_template_needs_a_package_that_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    Path("mine.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"needs the package jinja2(?s:.*)jaxpar\[sft\]"):
        load(CHAT, chat_template="mine.jinja")
    save_bpe("tokenizer.json", ["</s>"])
    Path("tokenizer_config.json").write_text('{"chat_template": "x"}')
    with pytest.raises(ConfigError, match=r"tokenizer_config.json': needs the package jinja2"):
        load(CHAT, chat_template=None, tokenizer="tokenizer.json")
    # Prompts and responses need no template.
    assert load(PAIR, chat_template=None, tokenizer="tokenizer.json").num_documents == 1


LIKE_CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = [
    (LIKE_CHATML, None),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{% if messages|length == 5 %}!{% endif %}", None),
    ("{% if messages|length < 5 %}{{ messages|length }}{% endif %}{{ messages[-1].content }}", "in another way"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ strftime_now('%Y') }}", "strftime_now"),
    ("{% if %}", "is malformed"),
]


@pytest.mark.parametrize(("template", "error"), TEMPLATES)
def test_templates_of_the_tokenizer(template, error):
    save_bpe("tokenizer.json", ["</s>", "<s>", "<|im_start|>", "<|im_end|>"])
    Path("tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}}))
    fields = {"chat_template": None, "tokenizer": "tokenizer.json", "seq_len": 256}
    if error:
        with pytest.raises(ConfigError, match=error):
            load(CHAT, **fields)
        return
    row = load(CHAT, **fields).train[0]
    tokenizer = load_tokenizer("tokenizer.json")
    if template == LIKE_CHATML:
        expected = load(CHAT, **fields | {"chat_template": "chatml"}).train[0]
        assert row["labels"][:-1].tolist() == [tokenizer.encode("<|im_start|>")[0], *expected["labels"][:-2].tolist()]
        assert row["weights"].sum() == expected["weights"].sum()
    else:
        assert tokenizer.decode(row["labels"][row["weights"] == 1]) in ("Hello.Ciao.!", "Hello.Ciao.")


def test_the_recipe_loads_and_its_answers_are_trained():
    train = load(paths=(str(DATA / "*.jsonl"),), tokenizer=str(DATA / "tokenizer.json"), pack=False).train
    tokenizer = load_tokenizer(str(DATA / "tokenizer.json"))
    texts = [tokenizer.decode(row["labels"][row["weights"] == 1]) for row in rows_of(train)]
    assert texts[:100] == [str(a + b) for a in range(10) for b in range(10)]
    assert texts[100] == "meow\nwoof\n"
