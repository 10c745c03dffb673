//! Names of conversations on disk: `SAVED-UNTIL-REPLICA-TOKEN`, with Unix times in milliseconds.
//!
//! With the times in the name, old conversations are found without opening a file, and later ones sort behind
//! earlier ones.

use std::path::Path;
use std::time::Duration;

use crate::clock::millis;

pub(crate) const RECORD_SUFFIX: &str = ".json";

/// Largest time of fifteen digits. A configured age may be longer.
const MAX_TIME: u64 = 999_999_999_999_999;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConversationName {
    /// Time of the save, less one millisecond for each later conversation of that save: names sort by age.
    pub(crate) saved: u64,
    /// Time at which the conversation expires if its model is not configured.
    pub(crate) until: u64,
    pub(crate) replica: u32,
    token: u64,
}

impl ConversationName {
    /// `now`: Unix time in milliseconds. `place`: number of later conversations of the same save.
    pub(crate) fn new(now: u64, age: Duration, replica: u32, place: usize) -> Self {
        let saved = now.saturating_sub(place as u64).min(MAX_TIME);
        Self { saved, until: saved.saturating_add(millis(age)).min(MAX_TIME), replica, token: rand::random() }
    }

    /// Returns `None` for other names.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let mut number = |digits: usize, radix: u32| {
            let part = parts.next()?;
            (part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .then(|| u64::from_str_radix(part, radix).ok())?
        };
        let (saved, until, replica) = (number(15, 10)?, number(15, 10)?, number(4, 10)?);
        let token = number(16, 16)?;
        let name = Self { saved, until, replica: u32::try_from(replica).ok()?, token };
        parts.next().is_none().then_some(name)
    }

    /// Parses the conversation's name from the path of its record.
    pub(crate) fn of_record(file: &Path) -> Option<Self> {
        Self::parse(file.file_name()?.to_str()?.strip_suffix(RECORD_SUFFIX)?)
    }

    /// Parses the conversation's name from the path of any of its files.
    pub(crate) fn of_part(file: &Path) -> Option<Self> {
        Self::parse(file.file_name()?.to_str()?.split_once('.')?.0)
    }
}

impl std::fmt::Display for ConversationName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { saved, until, replica, token } = self;
        write!(f, "{saved:015}-{until:015}-{replica:04}-{token:016x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_times_and_later_ones_sort_behind() {
        let of = |place| ConversationName::new(5000, Duration::from_millis(70), 3, place);
        let (late, early) = (of(0), of(2));
        assert!(early.to_string() < late.to_string() && early < late);
        assert_eq!((late.saved, late.until, late.replica), (5000, 5070, 3));
        assert_eq!(ConversationName::parse(&late.to_string()), Some(late.clone()));
        let endless = ConversationName::new(5000, Duration::MAX, 0, 0);
        assert_eq!(ConversationName::parse(&endless.to_string()), Some(endless));
        let file = |end: &str| format!("/d/{late}{end}");
        assert_eq!(ConversationName::of_record(Path::new(&file(".json"))), Some(late.clone()));
        assert_eq!(ConversationName::of_record(Path::new(&file(".json.tmp"))), None);
        assert_eq!(ConversationName::of_part(Path::new(&file(".slot.checkpoints"))), Some(late.clone()));
        let text = late.to_string();
        for other in
            ["", "5000", &text[1..], &format!("{text}-1"), &text.replace("0003", "+003"), "llama-warden-1"]
        {
            assert_eq!(ConversationName::parse(other), None, "{other}");
        }
    }
}
