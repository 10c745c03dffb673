//! Remembers the replica that last received a conversation: its cache probably holds the prompt.

use crate::names::QuickMap;

/// Number of conversations in each of the two maps. A replica has slots and cache for some tens.
const MAX_CONVERSATIONS: usize = 1024;

/// The replicas of the latest conversations.
#[derive(Debug, Default)]
pub struct ConversationReplicas {
    recent: QuickMap<u64, u32>,
    /// Earlier contents of `recent`.
    older: QuickMap<u64, u32>,
}

impl ConversationReplicas {
    /// Returns the replica that last received the conversation, if it is remembered.
    pub fn replica(&self, conversation: u64) -> Option<u32> {
        self.recent.get(&conversation).or_else(|| self.older.get(&conversation)).copied()
    }

    /// Records the replica that receives the conversation now.
    pub fn record_replica(&mut self, conversation: u64, replica: u32) {
        if self.recent.len() >= MAX_CONVERSATIONS && !self.recent.contains_key(&conversation) {
            self.older = std::mem::take(&mut self.recent);
        }
        self.older.remove(&conversation);
        self.recent.insert(conversation, replica);
    }

    /// Returns the number of remembered conversations of a replica.
    pub fn count_conversations(&self, replica: u32) -> usize {
        self.recent.values().chain(self.older.values()).filter(|home| **home == replica).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_conversations_are_remembered_and_old_ones_forgotten() {
        let mut homes = ConversationReplicas::default();
        let most = MAX_CONVERSATIONS as u64;
        homes.record_replica(0, 7);
        for conversation in 1..=most {
            homes.record_replica(conversation, 1);
            homes.record_replica(0, 7);
        }
        assert_eq!((homes.replica(0), homes.replica(1)), (Some(7), Some(1)));
        assert_eq!((homes.count_conversations(7), homes.count_conversations(1)), (1, MAX_CONVERSATIONS));
        for conversation in most + 1..=3 * most {
            homes.record_replica(conversation, 2);
        }
        assert_eq!((homes.replica(0), homes.replica(1)), (None, None), "not used for long");
        assert!(homes.count_conversations(2) <= 2 * MAX_CONVERSATIONS);
        homes.record_replica(3 * most, 1);
        assert_eq!(homes.replica(3 * most), Some(1), "it has moved");
    }
}
