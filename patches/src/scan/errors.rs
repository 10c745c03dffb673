//! Finds `#error` lines that a compiler certainly reaches, as far as macros are known.

use super::ScannedSource;
use super::condition::{MacroValue, evaluate_with};
use super::mask::split_directive;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReachedError {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// An open conditional. `None` means: depends on an unknown macro.
struct ErrorConditional {
    /// The current alternative is compiled, if the conditional itself is.
    taken: Option<bool>,
    /// An earlier alternative was taken.
    before: Option<bool>,
}

impl ErrorConditional {
    fn next(&mut self, holds: Option<bool>) {
        self.before = or(self.before, self.taken);
        self.taken = match (self.before, holds) {
            (Some(true), _) | (_, Some(false)) => Some(false),
            (Some(false), holds) => holds,
            (None, _) => None,
        };
    }
}

fn or(one: Option<bool>, other: Option<bool>) -> Option<bool> {
    match (one, other) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    }
}

/// Returns every `#error` whose conditions are all known to hold.
pub(crate) fn reached_errors(
    source: &ScannedSource,
    known: &dyn Fn(&str) -> MacroValue,
) -> Vec<ReachedError> {
    let mut open: Vec<ErrorConditional> = Vec::new();
    let mut all = Vec::new();
    for range in source.directives() {
        let split = |text: &[u8]| split_directive(text.get(range.clone())?);
        let Some((word, rest)) = split(source.code().as_bytes()) else { continue };
        let defined = |rest: &[u8]| evaluate_with(&[b"defined ", rest].concat(), known);
        let holds = match word.as_str() {
            "if" | "elif" => evaluate_with(&rest, known),
            "ifdef" | "elifdef" => defined(&rest),
            "ifndef" | "elifndef" => defined(&rest).map(|is| !is),
            "else" => Some(true),
            "endif" => {
                open.pop();
                continue;
            }
            "error" if open.iter().all(|one| one.taken == Some(true)) => {
                let raw = split(source.raw()).map(|(_, text)| text).unwrap_or_default();
                let text = String::from_utf8_lossy(raw.trim_ascii()).trim_matches('"').to_owned();
                all.push(ReachedError { line: source.line(range.start), text });
                continue;
            }
            _ => continue,
        };
        if word.starts_with("if") {
            open.push(ErrorConditional { taken: holds, before: Some(false) });
        } else if let Some(last) = open.last_mut() {
            last.next(holds);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Vec<(usize, String)> {
        let known = |name: &str| match name {
            "ONE" => MacroValue::Defined(1),
            "NONE" => MacroValue::Undefined,
            _ => MacroValue::Unknown,
        };
        reached_errors(&ScannedSource::new(text.as_bytes().to_vec()), &known)
            .into_iter()
            .map(|met| (met.line, met.text))
            .collect()
    }

    #[test]
    fn an_error_is_met_where_every_condition_around_it_holds() {
        for text in [
            "#error \"no\"\n",
            "#if defined(ONE)\n#error \"no\"\n#endif\n",
            "#ifndef NONE\n#  ifdef ONE\n#    error \"no\"\n#  endif\n#endif\n",
            "#if NONE\n#elif ONE\n#error \"no\"\n#endif\n",
            "#if NONE\n#else\n#error \"no\"\n#endif\n",
            "#if defined(ONE) == \\\n defined(ONE)\n#error \"no\"\n#endif\n",
            "#ifdef OTHER\n#endif\n#error \"no\"\n",
        ] {
            let found = said(text);
            assert!(matches!(found.as_slice(), [(_, words)] if words == "no"), "{text}: {found:?}");
        }
        assert_eq!(
            said("\n#if ONE\n#error twice\n#endif\n#error \"and again\"\n"),
            [(3, "twice".to_owned()), (5, "and again".to_owned())]
        );
    }

    #[test]
    fn an_error_that_is_not_met_or_on_which_nobody_knows_is_none() {
        for text in [
            "#if NONE\n#error \"no\"\n#endif\n",
            "#ifdef OTHER\n#error \"no\"\n#endif\n",
            "#ifdef OTHER\n#else\n#error \"no\"\n#endif\n",
            "#if ONE\n#else\n#error \"no\"\n#endif\n",
            "#if ONE\n#elif ONE\n#error \"no\"\n#endif\n",
            "#if OTHER\n#elif ONE\n#error \"no\"\n#endif\n",
            "#if 0\n#if ONE\n#error \"no\"\n#endif\n#endif\n",
            "#if OTHER\n#if ONE\n#error \"no\"\n#endif\n#endif\n",
            "// #error \"no\"\n",
        ] {
            assert_eq!(said(text), [], "{text}");
        }
    }
}
