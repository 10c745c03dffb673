//! Keep-alives for an event stream whose answer waits for a process.
//!
//! A comment satisfies HTTP proxies. Clients such as Codex and Claude Code reset their timeout on events
//! only, so the streams of `/v1/messages` and `/v1/responses` also get a harmless event.

use bytes::Bytes;

use crate::refusal::Dialect;

/// Returns a comment, followed by an event where clients of this dialect need one. `comment` is one line.
/// `has_begun`: the client already has events of the answer.
pub(super) fn life_sign(dialect: Dialect, has_begun: bool, comment: &str) -> Bytes {
    let event = match dialect {
        Dialect::Anthropic => "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        // OpenAI's own streams have this event. Its Python client (3.54) fails if the first event is not
        // `response.created`, or if a second one has another id. So no event is harmless before the answer
        // begins.
        Dialect::Responses if has_begun => "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n",
        Dialect::Responses | Dialect::OpenAi => "",
    };
    Bytes::from(format!(": {comment}\n\n{event}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_gets_the_event_that_its_clients_count_as_life() {
        for has_begun in [false, true] {
            let sign = |dialect| life_sign(dialect, has_begun, "x");
            assert_eq!(sign(Dialect::OpenAi), ": x\n\n");
            assert_eq!(sign(Dialect::Anthropic), ": x\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
            let alive = if has_begun { "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n" } else { "" };
            assert_eq!(sign(Dialect::Responses), format!(": x\n\n{alive}"));
        }
    }
}
