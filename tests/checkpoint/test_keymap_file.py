"""Key-map files: the documented examples on small trees, and every mistake with its line."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.keymap_file import read_keymap_file
from jaxpar.checkpoint.views import ExportedTensors, MappedTensors
from jaxpar.config import ConfigError
from jaxpar.families.keymap import TensorSource
from jaxpar.families.llama import llama_keymap
from tests.checkpoint.arrays import ArrayReader, whole

PAGE = Path(__file__).parents[2] / "docs" / "key-maps.md"
TOML = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
SHORT, STACKED, FUSED = TOML
L, D, H, K, HD, F, V, PADDED = 3, 12, 4, 2, 6, 10, 7, 9


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (V, D),
        "final_norm": (D,),
        "head": (D, V),
        "layers/attention_norm": (L, D),
        "layers/q": (L, D, H, HD),
        "layers/k": (L, D, K, HD),
        "layers/v": (L, D, K, HD),
        "layers/o": (L, H, HD, D),
        "layers/mlp_norm": (L, D),
        "layers/gate": (L, D, F),
        "layers/up": (L, D, F),
        "layers/down": (L, F, D),
    }
    assert {tuple(name.split("/")) for name in shapes} == llama_keymap(False).keys()
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stacked_tree(params):
    """Layers in dim 1 of every array."""
    names = {
        "attention_norm": "pre_self_attention_layer_norm/scale",
        "q": "self_attention/query/kernel",
        "k": "self_attention/key/kernel",
        "v": "self_attention/value/kernel",
        "o": "self_attention/out/kernel",
        "mlp_norm": "post_self_attention_layer_norm/scale",
        "gate": "mlp/wi_0/kernel",
        "up": "mlp/wi_1/kernel",
        "down": "mlp/wo/kernel",
    }
    tree = {
        f"params/params/decoder/layers/{name}": np.moveaxis(params[f"layers/{ours}"], 0, 1)
        for ours, name in names.items()
    }
    return tree | {
        "params/params/token_embedder/embedding": params["embedding"],
        "params/params/decoder/decoder_norm/scale": params["final_norm"],
        "params/params/decoder/logits_dense/kernel": params["head"],
        "opt_state/mu/params/decoder/decoder_norm/scale": params["final_norm"],
        "step": np.full((), 3),
    }


def neighbouring_pairs(w):
    """Column i of a head's first half, then column i of its second half."""
    return np.stack([w[..., : HD // 2], w[..., HD // 2 :]], axis=-1).reshape(w.shape)


def fused_tree(params):
    tree = {
        "params/transformer/wte/embedding": np.pad(params["embedding"], [(0, PADDED - V), (0, 0)]),
        "params/lm_head/kernel": np.pad(params["head"], [(0, 0), (0, PADDED - V)]),
        "params/transformer/ln_f/kernel": params["final_norm"],
        "optimizer/count": np.full((), 3),
    }
    for i in range(L):
        p = {name.removeprefix("layers/"): value[i] for name, value in params.items() if name.startswith("layers/")}
        qkv = [neighbouring_pairs(p["q"]), neighbouring_pairs(p["k"]), p["v"]]
        tree |= {
            f"params/transformer/h/{i}/{name}/kernel": value
            for name, value in {
                "attention_norm": p["attention_norm"],
                "attention/wqkv": np.concatenate([w.reshape(D, -1) for w in qkv], axis=1),
                "attention/wo": p["o"].reshape(H * HD, D),
                "ffn_norm": p["mlp_norm"],
                "feed_forward/gate_up": np.concatenate([p["gate"], p["up"]], axis=1),
                "feed_forward/down": p["down"],
            }.items()
        }
    return tree


def written(tmp_path, text):
    path = tmp_path / "map.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "tree_of"), [(STACKED, stacked_tree), (FUSED, fused_tree)], ids=["stacked", "fused"])
def test_a_documented_example_reads_its_tree(text, tree_of, params, tmp_path):
    keymap = read_keymap_file(written(tmp_path, text))
    shapes = {path: params["/".join(path)].shape for path in keymap.plan}
    view = MappedTensors(
        ArrayReader(tree_of(params)), keymap.plan, shapes=shapes, sizes=keymap.sizes, ignored=keymap.ignored
    )
    assert view.types.keys() == params.keys()
    for name, value in params.items():
        assert np.array_equal(whole(view, name), value), name


def test_a_documented_example_writes_its_tree_too(params, tmp_path):
    keymap = read_keymap_file(written(tmp_path, STACKED))
    exported = ExportedTensors(ArrayReader(params), keymap.plan, sizes=keymap.sizes)
    tree = stacked_tree(params)
    assert tree.keys() - exported.types.keys() == {"opt_state/mu/params/decoder/decoder_norm/scale", "step"}
    for name in exported.types:
        assert np.array_equal(whole(exported, name), tree[name])


def test_the_form_of_a_file(tmp_path):
    keymap = read_keymap_file(written(tmp_path, SHORT))
    rule = "embed (heads head_dim) -> layer embed heads head_dim"
    assert keymap.plan["layers", "q"] == TensorSource("params/h/{layer}/wq/kernel", rule)
    assert (keymap.sizes, keymap.ignored) == ({"head_dim": 8}, ("opt_state/.*", "step"))
    nested = f'[params.layers.q]\nfrom = "params/h/{{layer}}/wq/kernel"\nrule = "{rule}"\n'
    assert read_keymap_file(written(tmp_path, nested)).plan == {("layers", "q"): keymap.plan["layers", "q"]}


GOOD = '[params]\n"w" = { from = "t", rule = "a -> a" }\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["map.toml params", "at least one parameter"]),
        ("[params]\n", ["map.toml:1 params"]),
        ("[params\n", ["map.toml:1", "not valid TOML"]),
        (GOOD + '"w" = { from = "u", rule = "a -> a" }\n', ["map.toml:3", "not valid TOML"]),
        (GOOD + "[parms]\n", ["map.toml:3 parms", "unknown key", "did you mean params"]),
        (
            '[params]\n"a/b" = { frm = "t", rule = "a -> a" }\n',
            ["map.toml:2 params.a/b.frm", "did you mean from", "from is missing"],
        ),
        ('[params]\n"a/b" = { from = "t", rule = 3 }\n', ["map.toml:2 params.a/b = 3: rule is not text"]),
        ('[params]\n"a/b" = "t"\n', ["map.toml:2 params.a/b = 't'", "not an entry"]),
        ('[params]\n"a/b" = { from = "t", rule = "a b -> a" }\n', ["map.toml:2 params.a/b", "every dim exactly once"]),
        (
            GOOD + '"a/b" = { from = "t", rule = "a -> a" }\n[params.a]\nb = { from = "u", rule = "a -> a" }\n',
            ["map.toml:5 params.a.b", "parameter a/b is given twice"],
        ),
        ('[params]\n"a//b" = { from = "t", rule = "a -> a" }\n', ["map.toml:2", "empty name"]),
        (GOOD + "[sizes]\na = 0\n", ["map.toml:4 sizes.a = 0"]),
        (GOOD + "[sizes]\na = true\n", ["map.toml:4 sizes.a = True"]),
        (GOOD + '[sizes]\n"a b" = 2\n', ["sizes.a b", "not a name"]),
        ("sizes = 3\n" + GOOD, ["map.toml:1 sizes = 3"]),
        ('ignore = "x"\n' + GOOD, ["map.toml:1 ignore = 'x'", "not a list"]),
        ('ignore = ["ok", "("]\n' + GOOD, ["map.toml:1 ignore = '('", "not a regular expression"]),
    ],
)
def test_a_mistake_is_named_with_its_line(text, named, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_keymap_file(written(tmp_path, text))
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_all_mistakes_come_at_once(tmp_path):
    text = 'ignore = 1\nx = 1\n[params]\na = { from = "t", rule = "a" }\nb = 1\n[sizes]\nc = -1\n'
    with pytest.raises(ConfigError) as caught:
        read_keymap_file(written(tmp_path, text))
    assert [problem.key.partition(" ")[2] for problem in caught.value.problems] == [
        "x",
        "params.a",
        "params.b",
        "sizes.c",
        "ignore",
    ]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_keymap_file(tmp_path / "absent.toml")
