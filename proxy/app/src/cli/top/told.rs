//! Events of an instance as they are shown: when, of which model, in words, and with which mark in the line of its memory.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use warden_policies::ModelName;
use warden_supervisor::{Event, EventKind};

use super::input::Told;
use super::look::Tone;
use super::text::tame;
use crate::serve::describe;

/// An event for a screen that began at `began` (seconds since 1970), whose viewer lives in `zone`.
pub(super) fn told(event: &Event, began: i64, zone: &TimeZone) -> Told {
    let at: Option<Timestamp> = event.at.parse().ok();
    let time =
        at.map_or_else(|| tame(&event.at), |at| at.to_zoned(zone.clone()).strftime("%H:%M:%S").to_string());
    let seconds = at.map_or(f64::MIN, |at| at.duration_since(Timestamp::UNIX_EPOCH).as_secs_f64());
    let generation = event.generation.map(|generation| format!("{generation} ")).unwrap_or_default();
    Told {
        time,
        at: seconds - began_exactly(began),
        model: event.model.as_ref().map(|model| ModelName::as_str(model).to_owned()),
        text: tame(&format!("{generation}{}", describe(&event.kind))),
        mark: mark(&event.kind),
    }
}

fn began_exactly(began: i64) -> f64 {
    jiff::SignedDuration::from_secs(began).as_secs_f64()
}

/// What is seen in a memory: replacements, what was given back, ends, and that it began to look like a leak.
fn mark(kind: &EventKind) -> Option<(char, Tone)> {
    match kind {
        EventKind::RecycleDone { entry } if entry.given_up => None,
        EventKind::RecycleDone { entry } if entry.failed.is_none() => Some(('R', Tone::Good)),
        EventKind::RecycleDone { .. } | EventKind::Crashed { .. } | EventKind::Failed { .. } => {
            Some(('X', Tone::Bad))
        }
        EventKind::Reclaimed { .. } => Some(('c', Tone::Good)),
        EventKind::Unloaded { .. } | EventKind::MakesRoom { .. } => Some(('u', Tone::Quiet)),
        EventKind::Verdict { growth, .. } if growth.verdict.grows() => Some(('v', Tone::Warn)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_viewers_time_its_distance_and_no_letter_that_a_terminal_obeys() {
        let line = r#"{"id":1,"at":"2026-01-02T02:00:30Z","model":"a\u001b[2J","generation":3,"kind":"endpoint_answers","url":"http://a\u001b]0;x\u0007"}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        let began = "2026-01-02T02:00:00Z".parse::<Timestamp>().unwrap().as_second();
        let told = told(&event, began, &zone);
        assert_eq!((told.time.as_str(), told.at), ("04:00:30", 30.0));
        assert_eq!(told.text, "g3 the endpoint `http://a?]0;x?` answers");
        assert_eq!(told.model.as_deref(), Some("a\u{1b}[2J"), "routes know it so");
    }
}
