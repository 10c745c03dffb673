//! Pinning of a model by an operator: ledger line, event and view.

use serde::{Deserialize, Serialize};
use warden_policies::ModelName;

/// `kind` of a ledger line about a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PinKind {
    /// An operator pinned or unpinned a model.
    #[default]
    Pin,
}

/// Ledger entry for an operator's pin command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinEntry {
    /// Always `pin`.
    pub kind: PinKind,
    /// Entry number; all kinds of ledger entries share one counter.
    pub id: u64,
    /// Time, RFC 3339.
    pub at: String,
    /// Model.
    pub model: ModelName,
    /// True: the model is never unloaded for another one. False: it may be, even if the configuration pins
    /// it.
    pub pinned: bool,
    /// Value of `pin` in the configuration.
    pub configured: bool,
    /// Operator who gave the command, as far as known: `page, 127.0.0.1`.
    pub by: String,
}

impl PinEntry {
    /// Description in a sentence, for people.
    pub fn sentence(&self) -> String {
        let what = if self.pinned {
            "pinned: never unloaded for another model"
        } else {
            "may be unloaded for another model"
        };
        let against = if self.pinned == self.configured { "" } else { ", against its configuration" };
        format!("{what}{against} (by {})", self.by)
    }
}

/// Pin state of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinView {
    /// The model is never unloaded for another one.
    pub pinned: bool,
    /// Operator who set the pin; `None` if the configuration decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::ledger::LedgerEntry;
    use crate::view::reclaim_entry::ReclaimEntry;

    #[test]
    fn a_line_about_a_pin_is_told_from_all_others_and_says_what_it_overrules() {
        let entry = PinEntry {
            kind: PinKind::Pin,
            id: 3,
            at: "2026-01-02T03:04:05.678Z".to_owned(),
            model: ModelName::new("m"),
            pinned: true,
            configured: false,
            by: "page, 127.0.0.1".to_owned(),
        };
        let line = serde_json::to_string(&entry).unwrap();
        assert_eq!(serde_json::from_str::<PinEntry>(&line).unwrap(), entry);
        assert!(serde_json::from_str::<LedgerEntry>(&line).is_err());
        assert!(serde_json::from_str::<ReclaimEntry>(&line).is_err());
        let other = PinEntry { pinned: false, ..entry.clone() };
        insta::assert_snapshot!(format!("{}\n{}", entry.sentence(), other.sentence()), @r"
        pinned: never unloaded for another model, against its configuration (by page, 127.0.0.1)
        may be unloaded for another model (by page, 127.0.0.1)
        ");
    }
}
