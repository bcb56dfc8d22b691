"""The model that a form names, and another in its place."""

from proxy.form import model_of, with_model

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\xff\x00sound\r\n'
    b'--x\r\ncontent-disposition: form-data; name="model"\r\nX: y\r\n\r\nvendor/chat\r\n--x--\r\n'
)


def test_the_field_is_found_among_bytes_that_are_no_text() -> None:
    assert model_of(FORM) == "vendor/chat"
    assert model_of(FORM.replace(b'"model"', b'"mode"')) is None


def test_another_name_takes_its_place_and_the_rest_stays() -> None:
    changed = with_model(FORM, "a-much-longer-name")
    assert changed == FORM.replace(b"vendor/chat", b"a-much-longer-name")
    assert with_model(b"--x--", "chat") == b"--x--"
