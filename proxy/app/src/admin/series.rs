//! `GET /series`: recorded memory series, for programs.

use http::{Response, StatusCode};

use super::answer::{AdminBody, AdminState, error, json};
use crate::series::answer::{NoSeriesError, list, of_model};
use crate::series::ask::SeriesQuery;

impl AdminState {
    pub(super) async fn series(&self, query: Option<&str>) -> Response<AdminBody> {
        let ask = match SeriesQuery::of(query, self.series.policy()) {
            Ok(ask) => ask,
            Err(wrong) => return error(StatusCode::BAD_REQUEST, &wrong),
        };
        let Some(model) = &ask.model else {
            return match list(&self.series).await {
                Ok(listed) => json(StatusCode::OK, &listed),
                Err(failed) => error(StatusCode::SERVICE_UNAVAILABLE, &failed.to_string()),
            };
        };
        // The query may use an alias.
        let own = self.fleet.resolve(Some(model)).map_or_else(|_| model.clone(), |name| name.to_string());
        match of_model(&self.series, &self.fleet.view(), &own, &ask).await {
            Ok(data) => json(StatusCode::OK, &data),
            Err(unknown @ NoSeriesError::Unknown(_)) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
            Err(failed) => error(StatusCode::SERVICE_UNAVAILABLE, &failed.to_string()),
        }
    }
}
