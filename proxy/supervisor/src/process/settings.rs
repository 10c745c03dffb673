//! What clients have set in a server beside their requests (`POST /lora-adapters`, `POST /props`), kept per model so that it
//! can be set in the model's other processes, too, and again in the next one before anybody uses that. In memory only, bounded,
//! and never told: a body may be anybody's text.

use std::sync::Mutex;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use warden_policies::GenerationId;

use crate::sync::lock;

/// One thing that was set.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) path: String,
    pub(crate) body: Bytes,
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Setting({}, {} bytes)", self.path, self.body.len())
    }
}

/// What was set here in a process that another instance has by now.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SetElsewhere {
    /// The process that has it.
    pub(crate) generation: GenerationId,
    /// The later one has the higher number.
    pub(crate) number: u64,
    pub(crate) path: String,
    /// `None`: it is too large to be kept, and what was kept of the route is not what is set any more.
    pub(crate) body: Option<Vec<u8>>,
}

impl std::fmt::Debug for SetElsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.body.as_ref().map(Vec::len);
        write!(f, "SetElsewhere({}, {bytes:?} bytes, {})", self.path, self.number)
    }
}

/// All that is set in the processes of one model, in the order in which it was set. One for each route: llama-server takes
/// each as the whole of what it is about.
#[derive(Debug, Default)]
pub(crate) struct Settings(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    all: Vec<Setting>,
    /// Routes of what was set in one process and the others do not know yet, each with its number.
    fresh: Vec<(GenerationId, String, u64)>,
    /// How often something was set.
    sets: u64,
    /// Something was set, kept or not, since all was forgotten.
    touched: bool,
}

/// Routes of one model that are kept: llama-server has two.
const ROUTES: usize = 4;
/// Bytes of one: a list of a hundred adapters takes 4 KB, and what is larger is no setting.
pub(crate) const MOST: u64 = 64 * 1024;

impl Kept {
    /// Something was set by a route: what was kept of that is not what is set any more.
    fn note(&mut self, by: GenerationId, path: &str) {
        self.touched = true;
        self.all.retain(|known| known.path != path);
        self.fresh.retain(|(_, known, _)| known != path);
        self.sets += 1;
        self.fresh.push((by, path.to_owned(), self.sets));
    }
}

impl Settings {
    /// A process has taken this. False if it is too large to be kept; then what was kept of its route is gone, too, because
    /// it is not what is set any more.
    pub(crate) fn set(&self, by: GenerationId, path: &str, body: Bytes) -> bool {
        let mut kept = lock(&self.0);
        kept.note(by, path);
        let fits = body.len() as u64 <= MOST && kept.all.len() < ROUTES;
        if fits {
            kept.all.push(Setting { path: path.to_owned(), body });
        }
        fits
    }

    /// A process has taken something that is too large to be kept.
    pub(crate) fn lose(&self, by: GenerationId, path: &str) {
        lock(&self.0).note(by, path);
    }

    /// What was set since this was asked last: by which process, and by which route.
    pub(crate) fn take_fresh(&self) -> Vec<(GenerationId, String)> {
        let fresh = std::mem::take(&mut lock(&self.0).fresh);
        fresh.into_iter().map(|(by, path, _)| (by, path)).collect()
    }

    /// What the others do not know yet, for whoever goes on with the processes: nobody here tells them any more.
    pub(crate) fn untold(&self) -> Vec<SetElsewhere> {
        let kept = lock(&self.0);
        let of = |(generation, path, number): &(GenerationId, String, u64)| {
            let setting = kept.all.iter().find(|setting| setting.path == *path);
            let body = setting.map(|setting| setting.body.to_vec());
            SetElsewhere { generation: *generation, number: *number, path: path.clone(), body }
        };
        kept.fresh.iter().map(of).collect()
    }

    pub(crate) fn all(&self) -> Vec<Setting> {
        lock(&self.0).all.clone()
    }

    /// Something was set in a process by another instance, which keeps it.
    pub(crate) fn touch(&self) {
        lock(&self.0).touched = true;
    }

    /// Whether the model's processes are as their command made them.
    pub(crate) fn are_untouched(&self) -> bool {
        !lock(&self.0).touched
    }

    /// Forgets everything; the routes that something was set by.
    pub(crate) fn clear(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0)).all.into_iter().map(|setting| setting.path).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_each_route_counts_and_what_is_too_large_is_not_kept() {
        let settings = Settings::default();
        assert!(settings.are_untouched());
        let set = |path: &str, body: &str| {
            settings.set(GenerationId(1), path, Bytes::copy_from_slice(body.as_bytes()))
        };
        assert!(set("/lora-adapters", "[1]") && set("/props", "{}") && set("/lora-adapters", "[2]"));
        let kept: Vec<_> = settings.all().into_iter().map(|one| (one.path, one.body)).collect();
        assert_eq!(kept, [("/props".into(), "{}".into()), ("/lora-adapters".into(), "[2]".into())]);
        let untold: Vec<_> =
            settings.untold().into_iter().map(|one| (one.path, one.number, one.body)).collect();
        let of = |path: &str, number, body: &[u8]| (path.to_owned(), number, Some(body.to_vec()));
        assert_eq!(untold, [of("/props", 2, b"{}"), of("/lora-adapters", 3, b"[2]")]);
        let fresh = |path: &str| (GenerationId(1), path.to_owned());
        assert_eq!(settings.take_fresh(), [fresh("/props"), fresh("/lora-adapters")]);
        assert_eq!((settings.take_fresh(), settings.untold()), (vec![], vec![]));
        assert!(!format!("{settings:?}").contains("[2]"), "nothing of it is shown");
        assert!(!set("/lora-adapters", &"x".repeat(64 * 1024 + 1)));
        assert_eq!(settings.all().len(), 1, "the older one is not what is set");
        assert!(
            matches!(&settings.untold()[..], [one] if one.path == "/lora-adapters" && one.body.is_none())
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
