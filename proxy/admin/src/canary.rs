//! The route `/models/{name}/canary`: starts another build of llama-server for a share of a model's
//! traffic, shows its state, and ends it.

use std::time::Duration;

use http::{Method, Response, StatusCode};
use warden_config::machine::HostMachine;
use warden_config::resolve::binary::{BinaryChoice, BinarySearch};
use warden_config::resolve::store;
use warden_policies::defaults::parse_duration;
use warden_supervisor::{CanaryError, CanarySpec};

use crate::query::QueryPairs;
use crate::response::{AdminBody, error_response, json_response};
use crate::state::{AdminState, CanarySettings};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CanaryRequest {
    choice: BinaryChoice,
    /// Share of conversations; `None`: the default.
    share: Option<f64>,
    requests: Option<u64>,
    time: Option<Duration>,
    slower: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CanaryOrder {
    Start(Result<CanaryRequest, String>),
    Show,
    Stop,
}

impl CanaryOrder {
    /// Returns `None` for methods that the route does not have.
    pub(crate) fn from_method(method: &Method, query: Option<&str>) -> Option<Self> {
        match *method {
            Method::POST => Some(Self::Start(CanaryRequest::from_query(query))),
            Method::DELETE => Some(Self::Stop),
            Method::GET => Some(Self::Show),
            _ => None,
        }
    }
}

const QUERY_NAMES: &str = "`build` or `binary`, `share`, `requests`, `for`, `slower`";

impl CanaryRequest {
    pub(crate) fn from_query(query: Option<&str>) -> Result<Self, String> {
        let mut given = QueryPairs::strict(query)?;
        let request = Self {
            choice: parse_choice(given.take("build"), given.take("binary"))?,
            share: given.take("share").map(|text| parse_number("share", &text)).transpose()?,
            requests: given.take("requests").map(|text| parse_count(&text)).transpose()?,
            time: given.take("for").map(|text| parse_time(&text)).transpose()?,
            slower: given.take("slower").map(|text| parse_number("slower", &text)).transpose()?,
        };
        match given.unknown_name() {
            Some(name) => Err(format!("`{name}` says nothing here: the names are {QUERY_NAMES}")),
            None => Ok(request),
        }
    }

    /// Finds the requested llama-server, and runs it once to check that the program is a llama-server.
    async fn resolve_spec(self, tries: &CanarySettings) -> Result<CanarySpec, String> {
        let builds = |id: Option<&str>| store::find_build(&tries.data, id);
        let search = BinarySearch {
            machine: &HostMachine::read(),
            builds: &builds,
            cache: &tries.cache,
            timeout: tries.version_timeout,
        };
        let found = search.check(&self.choice).await?;
        let mut numbers = tries.numbers;
        numbers.requests = self.requests.unwrap_or(numbers.requests);
        numbers.time = self.time.unwrap_or(numbers.time);
        numbers.slower = self.slower.unwrap_or(numbers.slower);
        let share = self.share.unwrap_or(numbers.share);
        Ok(CanarySpec { binary: found.binary, build: found.build, facts: found.facts, share, numbers })
    }
}

fn parse_choice(build: Option<String>, binary: Option<String>) -> Result<BinaryChoice, String> {
    match (build, binary) {
        (Some(id), None) if !id.is_empty() => Ok(BinaryChoice::Build(id)),
        (None, Some(path)) if path.starts_with('/') => Ok(BinaryChoice::Path(path.into())),
        (None, Some(path)) => Err(format!("`binary={path}` is no absolute path")),
        _ => {
            Err("name one llama-server: `build=ID` of `llama-warden builds list`, or `binary=PATH`"
                .to_owned())
        }
    }
}

fn parse_number(name: &str, text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(format!("`{name}={text}` is no number from 0 on")),
    }
}

fn parse_count(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(format!("`requests={text}` is no count from 1 on")),
    }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err(format!("`for={text}` is no time: write it like `90m` or `24h`")),
    }
}

impl AdminState {
    pub(crate) async fn canary(&self, model: &str, order: CanaryOrder) -> Response<AdminBody> {
        let done = match order {
            CanaryOrder::Show => self.fleet.canary_view(model),
            CanaryOrder::Stop => self.fleet.stop_canary(model).await,
            CanaryOrder::Start(Err(why)) => return error_response(StatusCode::BAD_REQUEST, &why),
            CanaryOrder::Start(Ok(wish)) => {
                // Check the model first, so that no program is run for an unknown one.
                if let Err(unknown) = self.fleet.resolve(Some(model)) {
                    return error_response(StatusCode::NOT_FOUND, &unknown.to_string());
                }
                let tries = self.config.borrow().tries.clone();
                match wish.resolve_spec(&tries).await {
                    Ok(spec) => self.fleet.start_canary(model, spec).await,
                    Err(why) => return error_response(StatusCode::BAD_REQUEST, &why),
                }
            }
        };
        match done {
            Ok(view) => json_response(StatusCode::OK, &view),
            Err(failure) => error_response(status_code(&failure), &failure.to_string()),
        }
    }
}

fn status_code(failure: &CanaryError) -> StatusCode {
    match failure {
        CanaryError::Unknown(_) | CanaryError::None(_) => StatusCode::NOT_FOUND,
        CanaryError::NoBinary { .. } | CanaryError::NotABinary(_) | CanaryError::Share { .. } => {
            StatusCode::BAD_REQUEST
        }
        CanaryError::Remote(_)
        | CanaryError::OtherProgram(_)
        | CanaryError::Exists(_)
        | CanaryError::Fleet(_)
        | CanaryError::DidNotBegin { .. } => StatusCode::CONFLICT,
        CanaryError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_which_build_and_which_traffic() {
        let wish =
            CanaryRequest::from_query(Some("build=ab12&share=0.25&requests=10&for=90m&slower=0.5")).unwrap();
        assert_eq!(
            wish,
            CanaryRequest {
                choice: BinaryChoice::Build("ab12".into()),
                share: Some(0.25),
                requests: Some(10),
                time: Some(Duration::from_secs(5400)),
                slower: Some(0.5),
            }
        );
        let by_path = CanaryRequest::from_query(Some("binary=%2Fopt%2Fa%20b")).unwrap();
        assert_eq!(by_path.choice, BinaryChoice::Path("/opt/a b".into()));
    }

    #[test]
    fn what_cannot_be_meant_is_told() {
        let wrong = [
            "",
            "build=a&binary=/b",
            "binary=relative",
            "build=a&share=much",
            "build=a&share=-1",
            "build=a&requests=0",
            "build=a&for=0s",
            "build=a&for=soon",
            "build=a&slower=NaN",
            "build=a&shares=0.1",
        ];
        let told = wrong
            .map(|query| format!("{query}\n    {}\n", CanaryRequest::from_query(Some(query)).unwrap_err()));
        insta::assert_snapshot!(told.concat());
    }
}
