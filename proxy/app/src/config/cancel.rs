//! `cancel` of a model: how a client's leaving ends its work where the answer is no stream. Pure.
//!
//! llama-server looks whether such a client is still there only when nothing else wakes it for a second, which never
//! happens while it streams to others. The fix `cancel-nonstream` of our patch set cures that in the process and leaves
//! every byte alone; it is switched on by itself where the papers of the build name it. Without it, the gateway can ask
//! for a stream and assemble the answer. That is never done unasked: see docs/cancellation.md.

use serde::Deserialize;
use warden_builder::mitigation::BuildFacts;

use super::mitigations::Mitigations;

/// The fix.
const FIX: &str = "cancel-nonstream";
/// What switches it on.
pub(super) const VARIABLE: &str = "LLAMA_WARDEN_CANCEL_NONSTREAM";

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cancel {
    /// By the fix, where the build has it.
    Auto,
    /// By streams that the gateway puts together.
    Assemble,
    /// Not at all.
    Off,
}

impl Cancel {
    /// The variable to set for the fix, if it is to be switched on and nobody else has decided about it: an operator's
    /// own variable or mitigation counts more.
    pub(super) fn variable(
        self,
        build: &BuildFacts,
        mitigations: &Mitigations,
        env: &[(String, String)],
    ) -> Option<(String, String)> {
        let fixes = build.papers.as_ref().and_then(|papers| papers.fixes.as_deref()).unwrap_or_default();
        let decided =
            mitigations.ids().iter().any(|id| id == FIX) || env.iter().any(|(name, _)| name == VARIABLE);
        let set = self == Self::Auto && !decided && fixes.iter().any(|fix| fix == FIX);
        set.then(|| (VARIABLE.to_owned(), "1".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_builder::mitigation::Papers;

    #[test]
    fn the_fix_is_switched_on_where_the_build_has_it_and_nobody_decided_otherwise() {
        let build = |fixes: Option<&[&str]>| BuildFacts {
            binary: "/x".into(),
            number: None,
            papers: Some(Papers {
                fixes: fixes.map(|fixes| fixes.iter().map(|fix| (*fix).to_owned()).collect()),
                ..Papers::default()
            }),
        };
        let none = Mitigations::default();
        let with = build(Some(&["other", FIX]));
        let set = Some((VARIABLE.to_owned(), "1".to_owned()));
        assert_eq!(Cancel::Auto.variable(&with, &none, &[]), set);
        assert_eq!(Cancel::Assemble.variable(&with, &none, &[]), None);
        assert_eq!(Cancel::Off.variable(&with, &none, &[]), None);
        assert_eq!(Cancel::Auto.variable(&with, &none, &[(VARIABLE.to_owned(), "0".to_owned())]), None);
        assert_eq!(Cancel::Auto.variable(&build(Some(&["other"])), &none, &[]), None);
        assert_eq!(Cancel::Auto.variable(&build(None), &none, &[]), None);
        let foreign = BuildFacts { binary: "/x".into(), number: Some(8827), papers: None };
        assert_eq!(Cancel::Auto.variable(&foreign, &none, &[]), None);
    }
}
