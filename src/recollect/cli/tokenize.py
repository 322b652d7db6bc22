"""`recollect tokenize`: write documents as Megatron's indexed dataset."""

from rich.console import Console

from recollect.cli.commands import Tokenize
from recollect.errors import RecollectError
from recollect.lab.train.documents import open_tokenizer, read_documents
from recollect.lab.train.indexed_dataset import IndexedDataset, data_path, index_path, write_indexed_dataset
from recollect.printing import print_line


def run_tokenize(command: Tokenize, console: Console) -> None:
    prefix = command.output_prefix
    if data_path(prefix).exists() or index_path(prefix).exists():
        raise RecollectError(
            f"--output-prefix {prefix}: the files already exist, expected new ones. Remove them or choose a different prefix."
        )
    tokenizer = open_tokenizer(command.tokenizer)
    texts = read_documents(command.data, text_field=command.text_field)
    ids = (list(encoded) for encoded in tokenizer.encode(texts))
    write_indexed_dataset(prefix, ids, vocab_size=tokenizer.vocab_size)
    written = IndexedDataset(prefix)
    print_line(
        console,
        f"{len(written):,} documents, {int(written.lengths.sum()):,} tokens below {tokenizer.vocab_size}. Train on them with "
        f"--data-path {prefix} --vocab-size {tokenizer.vocab_size}.",
    )
