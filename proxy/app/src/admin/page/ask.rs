//! What is asked of the page: pairs of a query or a form, and addresses made of such pairs. Pure.

use std::fmt::Write as _;

use reqwest::Url;

/// Pairs, decoded. The first of a name counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ask(Vec<(String, String)>);

impl Ask {
    /// Of a query, or of a form as browsers send it. What cannot be decoded is decoded as browsers do, with marks for what is no text.
    pub(crate) fn of(query: Option<&str>) -> Self {
        let Some(query) = query.filter(|query| !query.is_empty()) else { return Self::default() };
        let mut url = base();
        url.set_query(Some(query));
        let all = url.query_pairs();
        Self(all.map(|(name, value)| (name.into_owned(), value.into_owned())).collect())
    }

    /// One value. One that is empty counts as none.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }
}

fn base() -> Url {
    #[expect(clippy::expect_used, reason = "a constant, tested")]
    Url::parse("http://localhost/").expect("a constant")
}

/// An address on this page. Values that are empty are left out.
pub(crate) fn address(path: &str, pairs: &[(&str, &str)]) -> String {
    let mut url = base();
    url.query_pairs_mut().extend_pairs(pairs.iter().filter(|(_, value)| !value.is_empty()));
    let mut text = path.to_owned();
    if let Some(query) = url.query().filter(|query| !query.is_empty()) {
        // Writing to a String cannot fail.
        // A blank may be spelled in two ways, of which not everybody reads both.
        let _ = write!(text, "?{}", query.replace('+', "%20"));
    }
    text
}

/// Whether a text has all these words, whatever their case.
pub(crate) fn has_words(words: &str, text: &str) -> bool {
    let text = text.to_lowercase();
    words.split_whitespace().all(|word| text.contains(&word.to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_into_an_address_comes_back_out_of_it() {
        let names = ["org/a b", "a&b=c", "ünï", "50%", "\"><script>", "a+b", "#?"];
        for name in names {
            let address = address("/page/memory", &[("model", name), ("empty", "")]);
            let (path, query) = address.split_once('?').unwrap();
            let asked = Ask::of(Some(query));
            assert_eq!((path, asked.get("model"), asked.get("empty")), ("/page/memory", Some(name), None));
            assert!(!address.contains(['<', '"', ' ']), "{address}");
        }
        assert_eq!(address("/page/", &[]), "/page/");
        assert_eq!(Ask::of(None).get("q"), None);
        assert_eq!(Ask::of(Some("q=%ff%zz&q=2&x")).get("q"), Some("\u{fffd}%zz"));
    }

    proptest::proptest! {
        /// Whatever is asked: it is pairs of text, and an address made of them means the same.
        #[test]
        fn any_query_is_pairs(query in crate::mutated::mutated_text(&["model=org%2Fa+b&span=7d&token=%ff&do=restart%20m", "&&=&a&=b&%"])) {
            let asked = Ask::of(Some(&query));
            for (name, value) in &asked.0 {
                let address = address("/page/memory", &[(name, value)]);
                proptest::prop_assert!(address.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\".contains(&byte)), "{}", address);
                let again = Ask::of(address.split_once('?').map(|(_, query)| query));
                proptest::prop_assert_eq!(again.get(name), Some(value.as_str()).filter(|value| !value.is_empty()));
            }
        }
    }

    #[test]
    fn words_are_found_in_any_order_and_case() {
        assert!(has_words("", "anything") && has_words(" B  a ", "xAyb"));
        assert!(!has_words("a c", "ab"));
    }
}
