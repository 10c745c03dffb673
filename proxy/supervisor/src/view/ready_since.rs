//! Moment when a process became ready. Serialization computes the seconds since then, so that a view written
//! late shows the present age.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::time::Instant;
use warden_policies::seconds::known;

/// Moment when a process became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadySince(Instant);

impl ReadySince {
    /// A moment `age` ago.
    pub fn from_age(age: Duration) -> Self {
        let now = Instant::now();
        Self(now.checked_sub(age).unwrap_or(now))
    }

    /// Time since that moment.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

impl From<Instant> for ReadySince {
    fn from(moment: Instant) -> Self {
        Self(moment)
    }
}

impl Serialize for ReadySince {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        known::serialize(&self.elapsed(), to)
    }
}

impl<'de> Deserialize<'de> for ReadySince {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        known::deserialize(from).map(Self::from_age)
    }
}
