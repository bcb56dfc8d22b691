from supervisor.models import tensors
from supervisor.models.gguf import Tensor

Q4_1, Q8_0 = 3, 8
EMBEDDING = Tensor("token_embd.weight", 0, Q8_0, (64, 416))
WIDE = Tensor("blk.0.ffn_up.weight", 0, Q4_1, (64, 96))
NARROW = Tensor("blk.0.attn_k.weight", 0, Q4_1, (64, 24))
NORM = Tensor("output_norm.weight", 0, 0, (64,))
OUTPUT = Tensor("output.weight", 0, Q8_0, (64, 416))


def test_matrices_are_summed_by_type_and_group_of_rows() -> None:
    found = tensors.matrix_bytes((EMBEDDING, WIDE, WIDE, NARROW, NORM, OUTPUT), generates=True)
    assert found == (("Q4_1", 8, 960), ("Q4_1", 32, 7680), ("Q8_0", 32, 28288))


def test_the_embedding_is_a_matrix_where_it_is_the_output_of_a_model_that_generates() -> None:
    assert tensors.matrix_bytes((EMBEDDING,), generates=True) == (("Q8_0", 32, 28288),)
    assert tensors.matrix_bytes((EMBEDDING,), generates=False) == ()
