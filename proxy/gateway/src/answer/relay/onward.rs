//! Moves an answer whose backend is gone to another one.

use bytes::Bytes;
use http::StatusCode;
use warden_policies::{ModelName, Work};

use super::Relay;
use super::ending::blame;
use crate::answer::assemble::is_events;
use crate::answer::continuation::{self, Cut, DONE, Repeat, Stage, Voice};
use crate::answer::meter::Meter;
use crate::answer::resuming::Resuming;
use crate::backend::again::Again;
use crate::backend::attempts::{Backend, Relayed};
use crate::observe::Outcome;
use crate::protocol::sse::Events;
use crate::protocol::wire;
use crate::refusal::Refusal;

impl Relay {
    /// Handles the loss of the backend. Returns whether the stream continues, or already has everything.
    pub(super) fn goes_on(&mut self, outcome: Outcome) -> bool {
        if self.voice.as_ref().is_some_and(|voice| voice.has_ended()) {
            self.finish_for(Bytes::new());
            return true;
        }
        let begun = self.events.as_ref().is_some_and(|events| events.seen() > 0);
        let heard = if begun {
            match self.heard.take_if(|heard| heard.lost().is_none() && self.again.is_some()) {
                Some(heard) => Some(heard),
                None => return false,
            }
        } else {
            None
        };
        let (Some(again), Some(terms)) = (self.again.take(), self.terms) else { return false };
        let is_one = heard.as_ref().is_some_and(|heard| continuation::is_one(&again, heard));
        if let Some(heard) = heard.as_ref().filter(|_| is_one) {
            let wants = || continuation::wants_usage(&again);
            let ends = match heard.stage() {
                Stage::Done => Some(Bytes::new()),
                Stage::Finished { counted } if counted || !wants() => Some(Bytes::from_static(DONE)),
                Stage::Going | Stage::Finished { .. } => None,
            };
            if let Some(words) = ends {
                self.finish_for(words);
                return true;
            }
        }
        let Some(lease) = self.lease.take() else { return false };
        blame(&*lease, &self.sent, outcome);
        // This work counts, whether or not the rest arrives.
        if begun && let Some(meter) = &self.meter {
            let (images, audio) = self.sent.media();
            let seen = self.events.as_ref().map(Events::seen);
            self.flight.record.work = Work { images, audio, ..meter.work(seen) };
        }
        self.conn = None;
        self.revoked = Box::pin(std::future::pending());
        self.flight.record.continued = true;
        if let Some(trace) = &mut self.flight.record.trace {
            trace.goes_on(outcome.as_str());
        }
        self.flight.progress.continues();
        self.spare = (lease.is_canary() && heard.is_none()).then(|| Box::new(again.search.clone()));
        let model = again.search.model.clone();
        let died = match outcome {
            Outcome::Revoked => Refusal::Revoked { model },
            _ => Refusal::Died { model },
        };
        let mut record = self.flight.record.clone();
        let paid = record.work;
        let looking = async move {
            let found = match heard {
                None => {
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, None)).map_err(Cut::from)
                }
                // The client has no content yet, so any answer will do: begin again under the same ids.
                Some(heard) if heard.is_blank() && is_one => {
                    let voice = Repeat::of(*heard, paid).map(Voice::Repeat);
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, voice)).map_err(Cut::from)
                }
                Some(heard) => {
                    let found = continuation::go_on(*again, heard, &mut record, lease, died, paid).await;
                    found.map(|(relayed, voice)| (relayed, Some(voice)))
                }
            };
            (record, found)
        };
        self.resuming = Some(Box::new(Resuming::new(Box::pin(looking), terms.comment)));
        true
    }

    /// Starts relaying another backend's answer to the same request, or its rest of the first answer.
    pub(super) fn resume(&mut self, relayed: Relayed, voice: Option<Voice>) {
        let Relayed { response, backend, kept, .. } = relayed;
        let Backend { lease, revoked, conn, pool, sent, deadline, begins_by } = *backend;
        lease.note_progress(0);
        lease.note_answered(true, true);
        self.incoming = response.into_body();
        (self.lease, self.conn) = (Some(lease), Some(conn));
        (self.revoked, self.pool, self.sent, self.deadline) = (revoked, pool, sent, deadline);
        // An incomplete event of the first backend is dropped.
        self.events = self.terms.map(|terms| Events::new(terms.limit));
        self.meter = self.tail_bytes.map(Meter::new);
        self.voice = voice.map(Box::new);
        (self.waiting, self.timer, self.begins_by) = (None, None, begins_by);
        // If this backend dies, too, the request may be moved again: the first one was only a canary.
        if let Some((search, message)) = self.spare.take().zip(kept) {
            self.again = Some(Box::new(Again { search: *search, message }));
            self.heard = self
                .terms
                .and_then(|terms| terms.continues)
                .map(|continues| Box::new(continues.transcript()));
        }
        self.begin();
    }
}

/// Checks that the answer of a second backend can take the place of the first one's stream.
pub(super) fn of_events(relayed: Relayed, model: &ModelName) -> Result<Relayed, Refusal> {
    let (status, headers) = (relayed.response.status(), relayed.response.headers());
    let why = match wire::check_answer(status, headers) {
        Err(why) => why.to_owned(),
        Ok(()) if status == StatusCode::OK && is_events(headers) => return Ok(relayed),
        Ok(()) => format!("the process that followed the one that died answers with {status} and no stream"),
    };
    Err(Refusal::Garbled { model: model.clone(), why })
}
