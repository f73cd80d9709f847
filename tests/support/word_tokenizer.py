"""A tokenizer with words, of which a cut text has other tokens; the embedded one has bytes."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCABULARY = 340
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<gmask>"]
_LEARNED = ["red -> rouge\nblue -> bleu", "The capital of France is", "Be brief. What is rain?"]


def word_tokenizer(
    front: Sequence[str] = ("<s>",),
    behind: Sequence[str] = (),
    template: str | None = None,
    eos: str | None = "</s>",
) -> PreTrainedTokenizerFast:
    """It puts special tokens in front of every text, and behind it."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LEARNED, trainer)
    if front or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join((*front, "$A", *behind)),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*front, *behind)],
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    return fast
