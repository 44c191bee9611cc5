"""A byte-pair tokenizer in Python over tiktoken, as Kimi-K2.5's is: it needs trust_remote_code and gives no offsets."""

import base64
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _characters() -> dict[int, str]:
    """A printable character for each byte, as GPT-2 has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


class StandinTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file, **kwargs):
        lines = Path(vocab_file).read_text(encoding="ascii").splitlines()
        self.ranks = {base64.b64decode(t): int(n) for t, n in map(str.split, lines)}
        self.encoding = tiktoken.Encoding(
            "standin", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens={}
        )
        self.vocab_file, self.characters = vocab_file, _characters()
        self.bytes = {c: b for b, c in self.characters.items()}
        self.by_rank = {n: self._shown(t) for t, n in self.ranks.items()}
        self.rank_of = {t: n for n, t in self.by_rank.items()}
        super().__init__(**kwargs)

    def _shown(self, token):
        return "".join(self.characters[b] for b in token)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return dict(self.rank_of) | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return [self.by_rank[i] for i in self.encoding.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.rank_of.get(token)

    def _convert_id_to_token(self, index):
        return self.by_rank[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes[c] for c in "".join(tokens)).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = Path(save_directory) / "tiktoken.model"
        if path.resolve() != Path(self.vocab_file).resolve():
            path.write_bytes(Path(self.vocab_file).read_bytes())
        return (str(path),)
