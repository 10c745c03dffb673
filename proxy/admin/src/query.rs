//! Parses queries and forms into pairs, in form encoding (`+` is a space). Used by all routes of the app.
//! Pure.

use reqwest::Url;

/// Pairs of names and values, decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryPairs(Vec<(String, String)>);

impl QueryPairs {
    /// Decodes a query or a form. Invalid bytes become replacement characters, as in browsers.
    pub fn lenient(query: Option<&str>) -> Self {
        let Some(query) = query.filter(|query| !query.is_empty()) else { return Self::default() };
        let mut url = base_url();
        url.set_query(Some(query));
        let all = url.query_pairs();
        Self(all.map(|(name, value)| (name.into_owned(), value.into_owned())).collect())
    }

    /// Like [`Self::lenient`], for routes that change something: fails with a sentence if a `%` begins no
    /// byte, the text is not UTF-8, or a name occurs twice.
    ///
    /// # Errors
    /// A sentence with the invalid part.
    pub fn strict(query: Option<&str>) -> Result<Self, String> {
        for pair in query.unwrap_or_default().split('&') {
            if warden_gateway::percent_decoded(pair).is_none() {
                return Err(format!(
                    "`{}` cannot be read: write `%` as `%25`, and text as UTF-8",
                    pair.escape_debug()
                ));
            }
        }
        let read = Self::lenient(query);
        let twice = read
            .0
            .iter()
            .enumerate()
            .find(|(n, (name, _))| read.0[..*n].iter().any(|(other, _)| other == name));
        match twice {
            Some((_, (name, _))) => Err(format!("`{name}` is given twice")),
            None => Ok(read),
        }
    }

    /// Returns the first value of a name; `None` if it is empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    /// Removes and returns a value, even an empty one.
    pub(crate) fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.remove(at).1)
    }

    /// Returns whether a switch is on: its name without a value, or with `1` or `true`.
    pub(crate) fn is_set(&self, name: &str) -> bool {
        self.0.iter().any(|(known, value)| known == name && matches!(value.as_str(), "" | "1" | "true"))
    }

    /// Returns the first name that was not taken.
    pub(crate) fn unknown_name(&self) -> Option<&str> {
        self.0.first().map(|(name, _)| name.as_str())
    }

    #[cfg(test)]
    pub(crate) fn pairs(&self) -> &[(String, String)] {
        &self.0
    }
}

fn base_url() -> Url {
    #[expect(clippy::expect_used, reason = "a constant, tested")]
    Url::parse("http://localhost/").expect("a constant")
}

/// Returns an address with these pairs as its query. Pairs with an empty value are left out.
pub fn address_with_query(path: &str, pairs: &[(&str, &str)]) -> String {
    let mut url = base_url();
    url.query_pairs_mut().extend_pairs(pairs.iter().filter(|(_, value)| !value.is_empty()));
    // Write a space as `%20`, because not every reader knows `+`.
    match url.query().filter(|query| !query.is_empty()) {
        Some(query) => format!("{path}?{}", query.replace('+', "%20")),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_into_an_address_comes_back_out_of_it() {
        let names = ["org/a b", "a&b=c", "ünï", "50%", "\"><script>", "a+b", "#?"];
        for name in names {
            let address = address_with_query("/page/memory", &[("model", name), ("empty", "")]);
            let (path, query) = address.split_once('?').unwrap();
            let asked = QueryPairs::strict(Some(query)).unwrap();
            assert_eq!((path, asked.get("model"), asked.get("empty")), ("/page/memory", Some(name), None));
            assert!(!address.contains(['<', '"', ' ']), "{address}");
        }
        assert_eq!(address_with_query("/page/", &[]), "/page/");
        assert_eq!(QueryPairs::lenient(None).get("q"), None);
        assert_eq!(QueryPairs::lenient(Some("q=%ff%zz&q=2&x")).get("q"), Some("\u{fffd}%zz"));
    }

    #[test]
    fn who_acts_on_a_query_takes_what_is_known_and_hears_of_the_rest() {
        let mut read = QueryPairs::strict(Some("to=%2Fopt%2Fa+b&follow&undo=0&wait=")).unwrap();
        assert_eq!((read.is_set("follow"), read.is_set("undo"), read.is_set("to")), (true, false, false));
        assert_eq!(read.take("to").as_deref(), Some("/opt/a b"));
        assert_eq!(read.get("wait"), None);
        assert_eq!((read.take("wait").as_deref(), read.take("to")), (Some(""), None));
        assert_eq!(read.unknown_name(), Some("follow"));
        for query in [None, Some(""), Some("&&")] {
            assert_eq!(QueryPairs::strict(query).unwrap().unknown_name(), None, "{query:?}");
        }
        let wrong = ["a=%", "a=%zz", "a=%ff", "%f=a", "a=1&b=2&a=3"];
        let told =
            wrong.map(|query| format!("{query}\n    {}\n", QueryPairs::strict(Some(query)).unwrap_err()));
        insta::assert_snapshot!(told.concat());
    }

    proptest::proptest! {
        /// Any query is parsed into pairs of text, and an address made of them has the same meaning.
        #[test]
        fn any_query_is_pairs(query in crate::mutated::mutated_text(&["model=org%2Fa+b&span=7d&token=%ff&do=restart%20m", "&&=&a&=b&%"])) {
            let asked = QueryPairs::lenient(Some(&query));
            for (name, value) in asked.pairs() {
                let address = address_with_query("/page/memory", &[(name, value)]);
                proptest::prop_assert!(address.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\".contains(&byte)), "{}", address);
                let again = QueryPairs::lenient(address.split_once('?').map(|(_, query)| query));
                proptest::prop_assert_eq!(again.get(name), Some(value.as_str()).filter(|value| !value.is_empty()));
            }
            if let Ok(read) = QueryPairs::strict(Some(&query)) {
                proptest::prop_assert_eq!(read, asked);
            }
        }
    }
}
