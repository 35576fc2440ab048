"""The dashboard: reads the books through billing, and shows what they say.

launch — starts Streamlit and ends it cleanly
settings — from the environment
app — what Streamlit runs for every reader: who is it, and which page
login — the session in the reader's cookie
database — read-only transactions, and the note when there are none
unit_economics_page — what came in, what it cost on both bases, where the device time went
economics_cards — its headline numbers
economics_tables — its tables by tenant and by model
requests_page — requests one by one, newest first
request_detail — one request: stages, tokens, attempts, ids
request_money — how its price and cost were computed
ranges — which time a page is about
figures — numbers as a reader wants them
cards — numbers in a grid that flows
facts — names and values in a grid
shares — one bar of parts that make a whole
table — text in rows that can be opened
charts — over time, in UTC
downloads — CSV with every digit
theme — colours and type, light and dark
"""
