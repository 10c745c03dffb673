//! `/models/{name}/diagnosis`: an experiment with a process of its own is begun, looked at, ended.

use http::{Response, StatusCode};
use warden_policies::experiment::Workload;

use super::answer::{Admin, Body, error, json};
use super::query::Query;
use super::route::Order;
use crate::diagnosis::{Refused, View, WORKLOADS, workload};

/// Reads the query of a `POST`: one kind of work, or all.
///
/// # Errors
/// What means nothing, in words.
pub(crate) fn chosen(query: Option<&str>) -> Result<Option<Workload>, String> {
    let mut given = Query::read(query)?;
    let word = given.take("workload").unwrap_or_default();
    if let Some(name) = given.left() {
        return Err(format!("`{name}` says nothing here: the only name is `workload`"));
    }
    workload(&word).map_err(|unknown| {
        let known: Vec<String> = WORKLOADS.iter().map(ToString::to_string).collect();
        format!("`workload={unknown}` is no work: it is one of {}, or left out for all", known.join(", "))
    })
}

impl Admin {
    /// Does what is wanted of the diagnosis of a model. There is one at a time, of whichever model.
    pub(super) async fn diagnosis(&self, model: &str, order: Order<Option<Workload>>) -> Response<Body> {
        let name = match self.fleet.resolve(Some(model)) {
            Ok(name) => name,
            Err(unknown) => return error(StatusCode::NOT_FOUND, &unknown.to_string()),
        };
        let done = match order {
            Order::Show => Ok(StatusCode::OK),
            Order::Stop => self.diagnoses.end(name.as_str(), &self.by).map(|()| StatusCode::OK),
            Order::Start(Err(why)) => return error(StatusCode::BAD_REQUEST, &why),
            Order::Start(Ok(workload)) => {
                let begun = self.diagnoses.begin(self, &name, workload, &self.by).await;
                begun.map(|()| StatusCode::ACCEPTED)
            }
        };
        match done {
            Ok(status) => json(status, &of(name.as_str(), self.diagnoses.view())),
            Err(refused) => error(status(&refused), &refused.to_string()),
        }
    }
}

/// As far as it is about this model.
fn of(model: &str, view: View) -> View {
    View {
        now: view.now.filter(|now| now.about.model == model),
        last: view.last.filter(|last| last.about.model == model),
    }
}

fn status(refused: &Refused) -> StatusCode {
    match refused {
        Refused::Ending => StatusCode::SERVICE_UNAVAILABLE,
        Refused::Another(_)
        | Refused::Busy(_)
        | Refused::Moves(_)
        | Refused::Waits(_)
        | Refused::Canary
        | Refused::Memory { .. }
        | Refused::Full(..)
        | Refused::Cannot(_) => StatusCode::CONFLICT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_of_work_is_chosen_or_all() {
        assert_eq!(chosen(None), Ok(None));
        assert_eq!(chosen(Some("workload=")), Ok(None));
        assert_eq!(chosen(Some("workload=short-text")), Ok(Some(Workload::ShortText)));
        for (query, told) in [
            ("workload=replay", "`workload=replay` is no work: it is one of short-text, "),
            ("workload=--html", "is no work"),
            ("workload=audio&workload=audio", "workload"),
            ("work=audio", "`work` says nothing here"),
            ("workload=%zz", "%25"),
        ] {
            let why = chosen(Some(query)).unwrap_err();
            assert!(why.contains(told), "{query}: {why}");
        }
    }

    #[test]
    fn whose_fault_a_refusal_is() {
        assert_eq!(status(&Refused::Busy(1)), StatusCode::CONFLICT);
        assert_eq!(status(&Refused::Ending), StatusCode::SERVICE_UNAVAILABLE);
    }
}
