//! Actions of the page: each form starts one action on one model. The action runs in the background, while
//! the answer redirects to the view with the form. The outcome is shown as a notice on every view, and
//! recorded as an event and, for some actions, in the ledger.

use std::net::IpAddr;

use warden_admin::query::QueryPairs;
use warden_admin::state::AdminState;
use warden_supervisor::{ControlError, LeaseKind, PromptFacts};

use crate::guard::PageRefusal;
use crate::hub::ActionOutcome;
use crate::state::PageState;
use crate::view::is_page_address;

/// Most concurrent actions; only a runaway script or a held-down key exceeds this limit.
const MAX_CONCURRENT_ACTIONS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageAction {
    Restart,
    Reclaim,
    Drain,
    Load,
    Release,
    Pin,
    Unpin,
}

impl PageAction {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Restart, "restart"),
        (Self::Reclaim, "reclaim"),
        (Self::Drain, "drain"),
        (Self::Load, "load"),
        (Self::Release, "release"),
        (Self::Pin, "pin"),
        (Self::Unpin, "unpin"),
    ];

    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == word).map(|(action, _)| *action)
    }

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(action, _)| *action == self).map_or("", |(_, word)| word)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ActionForm {
    pub(crate) action: PageAction,
    pub(crate) model: String,
    /// Path of the view to which the answer redirects.
    pub(crate) back: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FormError {
    #[error(transparent)]
    Refused(#[from] PageRefusal),
    #[error(
        "the form asks for `{0}`, which is no action: restart, reclaim, drain, load, release, pin, unpin"
    )]
    Unknown(String),
    #[error("{MAX_CONCURRENT_ACTIONS} actions are running: wait until one of them has ended")]
    TooMany,
}

/// Reads a form. `is_ours` checks whether a token is the one that this instance put into its forms.
pub(crate) fn parse_action(
    form: &QueryPairs,
    is_ours: impl FnOnce(&str) -> bool,
) -> Result<ActionForm, FormError> {
    if !form.get("token").is_some_and(is_ours) {
        return Err(PageRefusal::Token.into());
    }
    let asked = form.get("do").unwrap_or_default();
    let back = form.get("back").filter(|back| is_page_address(back)).unwrap_or("/page/").to_owned();
    match asked.split_once(' ').map(|(word, model)| (PageAction::from_word(word), model)) {
        Some((Some(action), model)) if !model.is_empty() => {
            Ok(ActionForm { action, model: model.to_owned(), back })
        }
        _ => Err(FormError::Unknown(asked.chars().take(100).collect())),
    }
}

pub(crate) fn caller_name(peer: Option<IpAddr>) -> String {
    peer.map_or_else(|| "page, admin socket".to_owned(), |peer| format!("page, {peer}"))
}

/// Starts an action. Returns the number of the notice that shows its outcome.
pub(crate) fn start_action(page: &PageState, order: ActionForm, who: String) -> Result<u64, FormError> {
    let desk = &page.hub;
    if desk.work.len() >= MAX_CONCURRENT_ACTIONS {
        return Err(FormError::TooMany);
    }
    let ActionForm { action, model, .. } = order;
    let id = desk.add_notice(format!("{} of {model}", action.word()));
    let admin = page.admin.clone();
    let desk = desk.clone();
    page.hub.work.spawn(async move {
        let outcome = match Box::pin(carry_out(&admin, action, &model, &who)).await {
            Ok(more) => ActionOutcome::Done(more),
            Err(why) => ActionOutcome::Failed(warden_policies::secrets::redact_text(&why)),
        };
        desk.set_outcome(id, outcome);
    });
    Ok(id)
}

/// Notifies the task that serves the request; the task then ends the request and answers the client.
pub(crate) fn cancel_request(
    page: &PageState,
    form: &QueryPairs,
    is_ours: impl FnOnce(&str) -> bool,
    who: &str,
) -> Result<u64, FormError> {
    if !form.get("token").is_some_and(is_ours) {
        return Err(PageRefusal::Token.into());
    }
    let Some(request) = form.get("id") else {
        return Err(FormError::Unknown("cancel of nothing".to_owned()));
    };
    let number = form.get("number").and_then(|number| number.parse().ok());
    let id = page.hub.add_notice(format!("cancel of request {request}"));
    let outcome = match page.admin.with_caller(who).cancel_request(request, number) {
        Ok(told) if told.again => ActionOutcome::Done("it was already being cancelled".to_owned()),
        Ok(_) => ActionOutcome::Done(String::new()),
        Err(why) => ActionOutcome::Failed(why.to_string()),
    };
    page.hub.set_outcome(id, outcome);
    Ok(id)
}

async fn carry_out(admin: &AdminState, action: PageAction, model: &str, who: &str) -> Result<String, String> {
    let fleet = &admin.fleet;
    let told = |error: ControlError| error.to_string();
    match action {
        PageAction::Restart => {
            let entries = fleet.restart_by(model, Some(who)).await.map_err(told)?;
            let each =
                entries.iter().map(|entry| format!("unavailable {} ms, {} cut", entry.gap_ms, entry.cut));
            Ok(each.collect::<Vec<_>>().join("; "))
        }
        PageAction::Drain => {
            fleet.drain_by(model, Some(who)).await.map_err(told)?;
            Ok("the next request loads it again".to_owned())
        }
        PageAction::Reclaim => {
            let entries = fleet.reclaim_by(model, Some(who)).await.map_err(told)?;
            let words: Vec<_> = entries.iter().map(warden_supervisor::ReclaimEntry::sentence).collect();
            let gave = entries.iter().any(|entry| entry.outcome.has_freed());
            if gave { Ok(words.join("; ")) } else { Err(words.join("; ")) }
        }
        PageAction::Load => {
            let name = fleet.resolve(Some(model)).map_err(|unknown| unknown.to_string())?;
            fleet.log_operator_action(Some(&name), action.word(), who);
            // Load the model through a lease that takes no slot, so that no serving process is affected.
            fleet
                .lease_for(&name, LeaseKind::Aux, PromptFacts::default())
                .await
                .map(drop)
                .map_err(|denied| denied.to_string())?;
            Ok(String::new())
        }
        PageAction::Release => {
            let name = fleet.resolve(Some(model)).map_err(|unknown| unknown.to_string())?;
            fleet.log_operator_action(Some(&name), action.word(), who);
            let released =
                fleet.release_requests(Some(name.as_str())).map_err(|unknown| unknown.to_string())?;
            Ok(format!("{released} request(s) released"))
        }
        PageAction::Pin | PageAction::Unpin => {
            fleet.pin(model, action == PageAction::Pin, who).await.map_err(told)?;
            Ok("until llama-warden restarts".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(form: &str) -> Result<ActionForm, FormError> {
        parse_action(&QueryPairs::lenient(Some(form)), |said| said == "right")
    }

    #[test]
    fn a_form_needs_the_token_and_one_of_the_actions() {
        let order = |action, model: &str, back: &str| {
            Ok(ActionForm { action, model: model.to_owned(), back: back.to_owned() })
        };
        assert_eq!(read("token=right&do=restart+a"), order(PageAction::Restart, "a", "/page/"));
        assert_eq!(
            read("token=right&do=drain+org%2Fa%20b&back=/page/%3Fq%3Dx"),
            order(PageAction::Drain, "org/a b", "/page/?q=x")
        );
        for form in [
            "",
            "do=restart+a",
            "token=&do=restart+a",
            "token=wrong&do=restart+a",
            "token=right2&do=restart+a",
        ] {
            assert_eq!(read(form), Err(FormError::Refused(PageRefusal::Token)), "{form}");
        }
        for form in [
            "token=right",
            "token=right&do=",
            "token=right&do=restart",
            "token=right&do=restart+",
            "token=right&do=kill+a",
            "token=right&do=restart&model=a",
        ] {
            assert!(matches!(read(form), Err(FormError::Unknown(_))), "{form}");
        }
    }

    #[test]
    fn nobody_is_led_elsewhere() {
        for back in [
            "https://evil.example/",
            "//evil.example",
            "/status",
            "/pagex",
            "javascript:alert(1)",
            "/page/\r\nset-cookie:x",
            "/page/\\evil",
            "",
            "/page",
        ] {
            let form = warden_admin::query::address_with_query(
                "",
                &[("token", "right"), ("do", "load a"), ("back", back)],
            );
            assert_eq!(read(&form[1..]).unwrap().back, "/page/", "{back}");
        }
    }
}
