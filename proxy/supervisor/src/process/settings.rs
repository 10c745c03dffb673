//! Settings that clients made in a server (`POST /lora-adapters`, `POST /props`), kept per model for its
//! other and new processes. They are in bounded memory and never logged: a body may contain a client's text.

use std::sync::Mutex;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use warden_policies::GenerationId;

use crate::sync::lock;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ClientSetting {
    pub(crate) path: String,
    pub(crate) body: Bytes,
}

impl std::fmt::Debug for ClientSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClientSetting({}, {} bytes)", self.path, self.body.len())
    }
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InheritedSetting {
    pub(crate) generation: GenerationId,
    /// Later settings have higher numbers.
    pub(crate) number: u64,
    pub(crate) path: String,
    /// `None` if the body was too large to be kept. It still replaces an earlier setting of the route.
    pub(crate) body: Option<Vec<u8>>,
}

impl std::fmt::Debug for InheritedSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.body.as_ref().map(Vec::len);
        write!(f, "InheritedSetting({}, {bytes:?} bytes, {})", self.path, self.number)
    }
}

/// Settings of one model, in order. Each one replaces the whole setting of its route, as in llama-server.
#[derive(Debug, Default)]
pub(crate) struct ClientSettings(Mutex<SettingState>);

#[derive(Debug, Default)]
struct SettingState {
    all: Vec<ClientSetting>,
    /// Process, route and sequence number of settings not yet applied to the other processes.
    fresh: Vec<(GenerationId, String, u64)>,
    sets: u64,
    /// True if a client made any setting, even one that could not be kept.
    touched: bool,
}

/// llama-server has two routes with settings.
const MAX_ROUTES: usize = 4;
/// Size limit of a setting. A list of a hundred adapters takes 4 KB.
pub(crate) const MAX_SETTING_BYTES: u64 = 64 * 1024;

impl SettingState {
    /// Records a new setting of this route, which invalidates the earlier one.
    fn note(&mut self, by: GenerationId, path: &str) {
        self.touched = true;
        self.all.retain(|known| known.path != path);
        self.fresh.retain(|(_, known, _)| known != path);
        self.sets += 1;
        self.fresh.push((by, path.to_owned(), self.sets));
    }
}

impl ClientSettings {
    /// Stores a setting that a process has accepted. Returns false if it is too large, and drops the earlier
    /// setting of the route.
    pub(crate) fn set(&self, by: GenerationId, path: &str, body: Bytes) -> bool {
        let mut kept = lock(&self.0);
        kept.note(by, path);
        let fits = body.len() as u64 <= MAX_SETTING_BYTES && kept.all.len() < MAX_ROUTES;
        if fits {
            kept.all.push(ClientSetting { path: path.to_owned(), body });
        }
        fits
    }

    pub(crate) fn note_too_large(&self, by: GenerationId, path: &str) {
        lock(&self.0).note(by, path);
    }

    pub(crate) fn take_fresh(&self) -> Vec<(GenerationId, String)> {
        let fresh = std::mem::take(&mut lock(&self.0).fresh);
        fresh.into_iter().map(|(by, path, _)| (by, path)).collect()
    }

    /// Settings that other processes lack, for the next instance to apply.
    pub(crate) fn unspread(&self) -> Vec<InheritedSetting> {
        let kept = lock(&self.0);
        let of = |(generation, path, number): &(GenerationId, String, u64)| {
            let setting = kept.all.iter().find(|setting| setting.path == *path);
            let body = setting.map(|setting| setting.body.to_vec());
            InheritedSetting { generation: *generation, number: *number, path: path.clone(), body }
        };
        kept.fresh.iter().map(of).collect()
    }

    pub(crate) fn all(&self) -> Vec<ClientSetting> {
        lock(&self.0).all.clone()
    }

    /// Records a setting that another instance keeps.
    pub(crate) fn note_touched(&self) {
        lock(&self.0).touched = true;
    }

    pub(crate) fn are_untouched(&self) -> bool {
        !lock(&self.0).touched
    }

    pub(crate) fn clear(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0)).all.into_iter().map(|setting| setting.path).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_each_route_counts_and_what_is_too_large_is_not_kept() {
        let settings = ClientSettings::default();
        assert!(settings.are_untouched());
        let set = |path: &str, body: &str| {
            settings.set(GenerationId(1), path, Bytes::copy_from_slice(body.as_bytes()))
        };
        assert!(set("/lora-adapters", "[1]") && set("/props", "{}") && set("/lora-adapters", "[2]"));
        let kept: Vec<_> = settings.all().into_iter().map(|one| (one.path, one.body)).collect();
        assert_eq!(kept, [("/props".into(), "{}".into()), ("/lora-adapters".into(), "[2]".into())]);
        let untold: Vec<_> =
            settings.unspread().into_iter().map(|one| (one.path, one.number, one.body)).collect();
        let of = |path: &str, number, body: &[u8]| (path.to_owned(), number, Some(body.to_vec()));
        assert_eq!(untold, [of("/props", 2, b"{}"), of("/lora-adapters", 3, b"[2]")]);
        let fresh = |path: &str| (GenerationId(1), path.to_owned());
        assert_eq!(settings.take_fresh(), [fresh("/props"), fresh("/lora-adapters")]);
        assert_eq!((settings.take_fresh(), settings.unspread()), (vec![], vec![]));
        assert!(!format!("{settings:?}").contains("[2]"), "nothing of it is shown");
        assert!(!set("/lora-adapters", &"x".repeat(64 * 1024 + 1)));
        assert_eq!(settings.all().len(), 1, "the older one is not what is set");
        assert!(
            matches!(&settings.unspread()[..], [one] if one.path == "/lora-adapters" && one.body.is_none())
        );
        assert!(!settings.are_untouched());
        assert_eq!((settings.clear(), settings.all().len()), (vec!["/props".to_owned()], 0));
        assert!(settings.are_untouched());
        assert!(
            !set("/props", &"x".repeat(64 * 1024 + 1)) && !settings.are_untouched(),
            "it is set, though not kept"
        );
    }
}
