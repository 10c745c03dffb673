//! Parses an item of a list of mitigations: `id`, `id=value`, `id.part=value`.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MitigationItem<'a> {
    /// Text before the dot and the equals sign.
    pub(super) id: &'a str,
    /// Text between dot and equals sign.
    pub(super) part: Option<&'a str>,
    /// Text after the equals sign.
    pub(super) value: Option<&'a str>,
}

impl<'a> MitigationItem<'a> {
    /// Parses an item. A value may contain any text, even another equals sign.
    pub(super) fn parse(text: &'a str) -> Self {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.trim())),
            None => (text, None),
        };
        let (id, part) = match name.split_once('.') {
            Some((id, part)) => (id, Some(part.trim())),
            None => (name, None),
        };
        Self { id: id.trim(), part, value }
    }

    /// The item without its value.
    pub(super) fn name(&self) -> String {
        match self.part {
            Some(part) => format!("{}.{part}", self.id),
            None => self.id.to_owned(),
        }
    }
}

/// Name of a fix's additional variable after the dot: the variable's name without our prefix, the fix's own
/// words and the unit. `LLAMA_WARDEN_GRAPH_IDLE_TRIM_S` of `graph-cache-cap` is `idle-trim`.
pub(super) fn part_name(fix: &str, variable: &str) -> String {
    let own: Vec<&str> = fix.split('-').collect();
    let bare = variable.strip_prefix("LLAMA_WARDEN_").unwrap_or(variable).to_lowercase();
    let mut words: Vec<&str> = bare.split('_').skip_while(|word| own.contains(word)).collect();
    if words.len() > 1 && words.last().is_some_and(|last| ["s", "ms", "mib", "kib", "bytes"].contains(last)) {
        words.pop();
    }
    if words.is_empty() { bare.replace('_', "-") } else { words.join("-") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_split_at_its_first_equals_sign_and_dot() {
        assert_eq!(MitigationItem::parse("a"), MitigationItem { id: "a", part: None, value: None });
        assert_eq!(
            MitigationItem::parse(" a = x=y.z "),
            MitigationItem { id: "a", part: None, value: Some("x=y.z") }
        );
        assert_eq!(
            MitigationItem::parse("a.b=1"),
            MitigationItem { id: "a", part: Some("b"), value: Some("1") }
        );
        assert_eq!(MitigationItem::parse("a.b=1").name(), "a.b");
    }

    #[test]
    fn a_part_is_named_by_what_its_variable_says_beyond_the_fix() {
        assert_eq!(part_name("graph-cache-cap", "LLAMA_WARDEN_GRAPH_IDLE_TRIM_S"), "idle-trim");
        assert_eq!(part_name("pool-purge", "LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS"), "interval");
        assert_eq!(part_name("cublas-reset", "LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S"), "interval");
        assert_eq!(part_name("memory-report", "LLAMA_WARDEN_REPORT"), "report");
    }
}
