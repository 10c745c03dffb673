//! A request as the admin routes list it, for tests of this crate, of the page and of the program.

use warden_gateway::{RequestState, RequestView};
use warden_policies::{GenerationId, ModelName};

pub(crate) fn request(id: &str, state: RequestState) -> RequestView {
    let ended = state == RequestState::Ended;
    RequestView {
        id: id.to_owned(),
        number: 7,
        state,
        model: Some(ModelName::new("m")),
        replica: None,
        generation: Some(GenerationId(3)),
        route: "chat".to_owned(),
        method: "POST".to_owned(),
        protocol: "http/1.1".to_owned(),
        key: Some("alice".to_owned()),
        peer: "192.0.2.7".to_owned(),
        stream: true,
        began_unix_ms: 1_800_000_000_000,
        ended_unix_ms: ended.then_some(1_800_000_012_345),
        total_ms: 12_345.0,
        queued_ms: 1500.0,
        prefill_ms: Some(2000.0),
        generating_ms: Some(8845.0),
        prompt_tokens: 4096,
        output_tokens: 220,
        attempts: 1,
        cancelled: false,
        continued: false,
        status: ended.then_some(200),
        outcome: ended.then(|| "ok".to_owned()),
    }
}
