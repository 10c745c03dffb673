//! How large a request's body may be, and how slowly it may come.

use warden_policies::defaults::Server;

use crate::body::body_rate::BodyRate;
use crate::config::GatewayConfig;
use crate::refusal::{BodyFault, Refusal};
use crate::route::BodySize;

/// Limits of a body, or of what of it is still to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of the whole body.
    pub(crate) bytes: u64,
    /// The setting that says so.
    pub(crate) key: &'static str,
    /// How slowly it may come.
    pub(crate) rate: BodyRate,
    /// A slot waits for it: it could not be held whole.
    pub(crate) in_slot: bool,
}

impl Limits {
    /// What a body of this class may be.
    pub(crate) fn of(config: &GatewayConfig, size: BodySize) -> Self {
        let (bytes, key) = match size {
            BodySize::Prompt => (config.server.body_bytes, "server.body_bytes"),
            BodySize::Audio => (config.server.audio_body_bytes, "server.audio_body_bytes"),
            BodySize::Text => (config.server.text_body_bytes, "server.text_body_bytes"),
            BodySize::Control => (config.server.control_body_bytes, "server.control_body_bytes"),
        };
        let narrower = matches!(size, BodySize::Text | BodySize::Control) && config.server.body_bytes < bytes;
        let (bytes, key) =
            if narrower { (config.server.body_bytes, "server.body_bytes") } else { (bytes, key) };
        let rate =
            BodyRate::new(config.server.body_timeout, config.server.body_rate.0, config.server.body_deadline);
        Self { bytes: bytes.0, key, rate, in_slot: false }
    }

    /// The same while a slot waits for the rest of the body.
    pub(crate) fn while_in_slot(self, config: &Server) -> Self {
        let (pause, rate) = (config.slot_body_pause, config.slot_body_rate.0);
        Self { rate: BodyRate::new(pause, rate, config.body_deadline), in_slot: true, ..self }
    }

    /// The refusal of a body that failed.
    pub(crate) fn refusal(self, fault: BodyFault) -> Refusal {
        match fault {
            BodyFault::TooLarge => Refusal::BodyTooLarge { limit: self.bytes, key: self.key },
            // Where there is room, such a body is let come as slowly as others.
            BodyFault::TooSlow if self.in_slot => Refusal::Busy,
            BodyFault::TooSlow => Refusal::BodyTooSlow,
            BodyFault::Undecodable => Refusal::BodyUndecodable,
            BodyFault::TooDense => Refusal::BodyTooDense,
            BodyFault::TwoModels => Refusal::TwoModels,
            // Those that send bodies say more about the last two.
            BodyFault::Broken | BodyFault::Quarantined | BodyFault::Stopped => Refusal::BodyBroken,
        }
    }
}
