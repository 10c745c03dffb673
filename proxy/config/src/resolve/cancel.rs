//! `cancel` of a model: how the work for a non-streamed answer is stopped when its client disconnects.
//!
//! llama-server checks for such a disconnect only after a second without other events, which may never come
//! while it streams to other clients. The fix `cancel-nonstream` of llama-warden's patch set makes the
//! process notice the disconnect; it is switched on if the provenance of the build lists it.

use warden_patches::mitigation::BuildFacts;
use warden_policies::modes::CancelMode;

use super::mitigations::ModelMitigations;

const CANCEL_FIX: &str = "cancel-nonstream";
pub(crate) const CANCEL_FIX_VARIABLE: &str = "LLAMA_WARDEN_CANCEL_NONSTREAM";

/// Returns the variable that switches the fix on. `None` if `cancel` does not allow the fix, the build lacks
/// it, or the operator set the variable or the mitigation.
pub(crate) fn cancel_fix_variable(
    cancel: CancelMode,
    build: &BuildFacts,
    mitigations: &ModelMitigations,
    env: &[(String, String)],
) -> Option<(String, String)> {
    let fixes =
        build.provenance.as_ref().and_then(|provenance| provenance.fixes.as_deref()).unwrap_or_default();
    let decided = mitigations.ids().iter().any(|id| id == CANCEL_FIX)
        || env.iter().any(|(name, _)| name == CANCEL_FIX_VARIABLE);
    let set = cancel == CancelMode::Auto && !decided && fixes.iter().any(|fix| fix == CANCEL_FIX);
    set.then(|| (CANCEL_FIX_VARIABLE.to_owned(), "1".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_patches::mitigation::ProvenanceFacts;

    #[test]
    fn the_fix_is_switched_on_where_the_build_has_it_and_nobody_decided_otherwise() {
        let build = |fixes: Option<&[&str]>| BuildFacts {
            binary: "/x".into(),
            number: None,
            provenance: Some(ProvenanceFacts {
                fixes: fixes.map(|fixes| fixes.iter().map(|fix| (*fix).to_owned()).collect()),
                ..ProvenanceFacts::default()
            }),
        };
        let none = ModelMitigations::default();
        let with = build(Some(&["other", CANCEL_FIX]));
        let set = Some((CANCEL_FIX_VARIABLE.to_owned(), "1".to_owned()));
        assert_eq!(cancel_fix_variable(CancelMode::Auto, &with, &none, &[]), set);
        assert_eq!(cancel_fix_variable(CancelMode::Off, &with, &none, &[]), None);
        assert_eq!(
            cancel_fix_variable(
                CancelMode::Auto,
                &with,
                &none,
                &[(CANCEL_FIX_VARIABLE.to_owned(), "0".to_owned())]
            ),
            None
        );
        assert_eq!(cancel_fix_variable(CancelMode::Auto, &build(Some(&["other"])), &none, &[]), None);
        assert_eq!(cancel_fix_variable(CancelMode::Auto, &build(None), &none, &[]), None);
        let foreign = BuildFacts { binary: "/x".into(), number: Some(8827), provenance: None };
        assert_eq!(cancel_fix_variable(CancelMode::Auto, &foreign, &none, &[]), None);
    }
}
