//! Percent-encoded text in a request target: the `model` of a query, the id in a path.

/// The first value of `name` in a query, decoded as a form is: `+` is a space. `None` if it is absent or not UTF-8.
pub(crate) fn parameter(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key, true)? == name).then(|| decode(value, true)).flatten()
    })
}

/// A path segment or several, decoded; slashes may be spelled either way.
pub(crate) fn path(text: &str) -> Option<String> {
    decode(text, false)
}

/// The key of a pair, decoded as a form is.
pub(crate) fn decoded_key(text: &str) -> Option<String> {
    decode(text, true)
}

/// A text as the value of a query: everything but letters, digits and `-._~/` becomes `%XX`.
pub(crate) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            for digit in [byte >> 4, byte & 15] {
                out.push(char::from(b"0123456789ABCDEF"[usize::from(digit)]));
            }
        }
    }
    out
}

fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'%' => {
                let digits = text.get(at + 1..at + 3)?;
                if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                    return None;
                }
                out.push(u8::from_str_radix(digits, 16).ok()?);
                at += 3;
                continue;
            }
            b'+' if plus_is_space => out.push(b' '),
            byte => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_a_query_is_decoded() {
        for (query, model) in [
            ("model=a", Some("a")),
            ("x=1&model=org%2Fb+c&model=second", Some("org/b c")),
            ("mod%65l=a", Some("a")),
            ("model=", Some("")),
            ("model", Some("")),
            ("models=a", None),
            ("model=%zz", None),
            ("model=%+1", None),
            ("model=%ff", None),
            ("model=%f", None),
            ("", None),
        ] {
            assert_eq!(parameter(query, "model").as_deref(), model, "{query}");
        }
        assert_eq!(path("org/a%2Bb+c").as_deref(), Some("org/a+b+c"));
    }
}
